"""A process that answers cases as .ci/gpu_cases.py's do, by their family: some hang, some die."""

from __future__ import annotations

import json
import os
import sys
import time

for line in sys.stdin:
    case = json.loads(line)["case"]
    if case["family"] == "hang":
        print("waits for ever", file=sys.stderr, flush=True)
        time.sleep(600)
    if case["family"] == "abort":
        os.abort()
    if case["family"] == "slow":
        time.sleep(0.7)
    if case["family"] == "error":  # as after an illegal access: it answers and ends
        print(json.dumps({"status": "error", "detail": "DeviceError: illegal access"}), flush=True)
        sys.exit(1)
    status = {"wrong": "failed"}.get(case["family"], "ok")
    print(json.dumps({"status": status, "detail": "other bits", "process": os.getpid()}), flush=True)
