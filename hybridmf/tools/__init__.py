"""Tools built on models: plans before a fit, calibration, the demo, fits by several processes."""
