"""A process that takes cases, one JSON line each, from standard input and answers with a JSON line each."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def serve(folder: str, device: str) -> int:
    """Answer cases until the input ends; ends after an exception, since a CUDA error leaves no usable context."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not get between the answers
    faulthandler.enable()
    from .cases import Case
    from .check import Bench, run_case

    bench = Bench(Path(folder), device)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        case = Case.from_json(asked["case"])
        started = time.monotonic()
        # shortly before the parent kills a hanging process, its stack goes to the log
        faulthandler.dump_traceback_later(0.95 * asked["seconds"])
        try:
            result = run_case(bench, case, asked.get("expected"))
        except Exception as error:
            traceback.print_exc()
            result = {"status": "error", "detail": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        faulthandler.cancel_dump_traceback_later()
        result["seconds"] = round(time.monotonic() - started, 1)
        print(json.dumps(result), file=answers, flush=True)
        if result["status"] == "error":
            return 1
    return 0
