#!/usr/bin/env bash
# Build the wheel and the sdist, check them, and try the wheel in an empty environment.
#
#     PYTHON=.venv/bin/python tools/check_wheel.sh
#
# PYTHON (default: python) needs `build` and `twine`. The script writes to a temporary folder only.
set -euo pipefail

PYTHON=$(command -v "${PYTHON:-python}")
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac

echo "== build"
git -C "$REPOSITORY" archive --format=tar HEAD | tar -x --one-top-level="$WORK/source"
"$PYTHON" -m build --outdir "$WORK/dist" "$WORK/source" > "$WORK/build.log" || { cat "$WORK/build.log"; exit 1; }
"$PYTHON" -m twine check --strict "$WORK"/dist/*

echo "== every tracked file of the package is in the wheel"
"$PYTHON" -m zipfile --list "$WORK"/dist/*.whl | awk '{print $1}' | sort > "$WORK/packed"
git -C "$REPOSITORY" ls-tree -r --name-only HEAD seqdefer | sort > "$WORK/tracked"
missing=$(comm -13 "$WORK/packed" "$WORK/tracked")
[ -z "$missing" ] || { echo "missing from the wheel:"; echo "$missing"; exit 1; }

echo "== install into an empty environment"
"$PYTHON" -m venv "$WORK/env"
"$WORK/env/bin/python" -m pip install --quiet --constraint "$WORK/source/constraints.txt" "$WORK"/dist/*.whl

echo "== run"
cd "$WORK"
env/bin/seqdefer --help
env/bin/seqdefer tasks
OMP_NUM_THREADS=1 env/bin/python - "$WORK/source/README.md" <<'PYTHON'
import re
import sys
from pathlib import Path

blocks = re.findall(r"^```python\n(.*?)^```$", Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
exec(next(block for block in blocks if "ToyTask" in block))
PYTHON
echo "== the wheel works"
