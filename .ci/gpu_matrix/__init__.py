"""Fits at real shapes on a GPU, several processes side by side, checked without the library: see .ci/gpu_cases.py."""
