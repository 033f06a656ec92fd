"""Every GPU kernel once or more on small problems: what compute-sanitizer runs (.ci/gpu calls it under each tool)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from support.kernel_cases import CASES


def main() -> None:
    """Run all cases."""
    for name, case in CASES.items():
        print(name, flush=True)
        case()
    print("all kernels ran")


if __name__ == "__main__":
    main()
