#!/usr/bin/env bash
# An environment with the other libraries of bench/ at pinned versions: `bash bench/rivals.sh [FOLDER] [PYTHON]`.
#
# FOLDER (default: .venv-rivals) becomes a virtual environment of PYTHON (default: python3.13; 3.12 works as well) with
# hybridmf of this checkout, the wheels of rivals.txt, and cmfrec and LIBMF built for this processor: as the package
# index ships it, LIBMF is 2.4 to 3.8 times slower. It takes some 5 minutes on 2 cores and needs a C and a C++ compiler.
# Then, on an idle machine: `FOLDER/bin/python bench/cpu.py --profile full`. buffalo: README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.venv-rivals}
python=${2:-python3.13}

"$python" -m venv "$folder"
pip=("$folder/bin/pip" --disable-pip-version-check install --quiet)
"${pip[@]}" --only-binary :all: -r bench/rivals.txt
"${pip[@]}" -e ".[test]"  # in place: scripts start processes in the checkout
"${pip[@]}" --no-binary cmfrec cmfrec==3.5.1.post14  # its setup.py detects -march=native and OpenMP
flags="-O3 -march=native -fopenmp -DUSEAVX -DUSEOMP"  # USESSE would override USEAVX
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS=-fopenmp "${pip[@]}" --no-cache-dir --no-binary libmf libmf==0.9.2
unset PYTHONPATH
"$folder/bin/python" -P - << 'PYTHON'
import sys
from importlib.metadata import version

sys.path.insert(0, "bench")
import rivals

print(*(f"{name} {version(name)}" for name in rivals.PEERS if rivals.installed(name)), sep="\n")
PYTHON
