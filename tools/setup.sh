#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a virtual environment with nemo2, editable, and what its tests need: tools/setup.sh PYTHON VENV
#
# Versions are those of constraints.txt, with which the tests last passed. CONSTRAINTS= takes the newest instead.
# On a machine without an NVIDIA GPU the CPU build of torch is taken where pip finds one: it is a tenth of the size of the
# default one on Linux. Set TORCH to choose yourself, for example TORCH="torch==2.13.0".
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
venv=${2:-.venv}
constraints=${CONSTRAINTS-constraints.txt}

runs() { "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
# pyenv answers to the names of all its versions, and runs those that are selected.
runs || export PYENV_VERSION="${python##*python}"
if ! runs; then
  version=$("$python" --version 2>&1 | head -n 1 || true)
  echo "nemo2 needs Python 3.11, 3.12 or 3.13, and '$python' is: ${version:-not there}." >&2
  echo "Name another one: make setup PYTHON=python3.12" >&2
  exit 1
fi

echo "==> $venv: a virtual environment of $("$python" --version)"
"$python" -m venv "$venv"
# No byte code is written ahead: most of what torch brings is never imported.
install() { "$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-compile "$@"; }

used=$(mktemp)
trap 'rm -f "$used"' EXIT
[ -z "$constraints" ] || cp "$constraints" "$used"
# The line of torch that applies to this Python; the file's own grammar is pip's.
torch=${TORCH:-$("$venv/bin/python" tools/constraints.py --requirement torch "$used")}
cpu=
case "$torch" in *==*) command -v nvidia-smi >/dev/null 2>&1 || cpu="$torch+cpu" ;; esac
if [ -n "${TORCH:-}" ] || [ "$torch" = torch ]; then
  echo "==> torch: the newest release that fits '$torch'"
  install "$torch"
  sed -i.bak '/^torch==/d' "$used" && rm -f "$used.bak"
elif [ -n "$cpu" ] && install --only-binary :all: "$cpu" 2>/dev/null; then
  echo "==> torch: $cpu"
else
  echo "==> torch: $torch, pip's default build; on Linux it brings CUDA, 3 GB to download and 6 GB on the disk"
  if ! install "$torch"; then
    echo "==> torch: $torch is not to be had here; the newest that is"
    install torch
    sed -i.bak '/^torch==/d' "$used" && rm -f "$used.bak"
  fi
fi

echo "==> nemo2 with lightning, megatron-core, nemo-run and the tools of its tests"
install --constraint "$used" --editable ".[test]"
cp "$used" "$venv/constraints.txt"  # for what is added later

# Last: make looks at this file to see that all of the above is done.
date >"$venv/.ready"
echo "==> ready; nemo2 is $venv/bin/nemo2"
