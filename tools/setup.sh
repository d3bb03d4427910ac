#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a virtual environment with nemo2, editable, and what its tests need: tools/setup.sh PYTHON VENV
#
# On a machine without an NVIDIA GPU the CPU build of torch is taken where pip finds one: it is a tenth of the size of the
# default one on Linux. Set TORCH to choose yourself, for example TORCH="torch==2.13.0".
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
venv=${2:-.venv}
torch_version=2.13.0

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  found=$("$python" --version 2>&1 || true)
  echo "nemo2 needs Python 3.11 or newer, and '$python' is: ${found:-not there}." >&2
  echo "Name another one: make setup PYTHON=python3.11" >&2
  exit 1
fi

echo "==> $venv: a virtual environment of $("$python" --version)"
"$python" -m venv "$venv"
# No byte code is written ahead: most of what torch brings is never imported.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install -qq --no-compile "$@"; }

if [ -n "${TORCH:-}" ]; then
  echo "==> torch: $TORCH, as TORCH asks"
  install "$TORCH"
elif command -v nvidia-smi >/dev/null 2>&1; then
  echo "==> torch: $torch_version, for the NVIDIA GPU of this machine"
  install "torch==$torch_version"
elif install --only-binary :all: "torch==$torch_version+cpu" 2>/dev/null; then
  echo "==> torch: $torch_version, the CPU build"
else
  echo "==> torch: $torch_version; no CPU build where pip looks, so the default one, which may be large"
  install "torch==$torch_version"
fi

echo "==> nemo2 with lightning, megatron-core, nemo-run and the tools of its tests"
install --editable ".[test]"

# Last: make looks at this file to see that all of the above is done.
date >"$venv/.ready"
echo "==> ready; nemo2 is $venv/bin/nemo2"
