#!/usr/bin/env bash
# Packs what a bare machine needs for bench/gpu_day.sh: this tree, and the packages that it has not,
# for Python 3.12 beside torch 2.11 for CUDA 13. No more than 64 MiB, so without matplotlib,
# transformers and what of CuPy the kernels leave alone; nccl4py does not fit.
#
#   bench/gpu_pack.sh FOLDER        # there: sh start.sh [the arguments of bench/gpu_day.sh]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?a folder to make}")
python=python3; [ -x .venv/bin/python ] && python=.venv/bin/python
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
git archive HEAD -- . ':!docs' ':!bench/results' ':!bench/published' | xz -6 >"$folder/tree.txz"
cat >"$folder/start.sh" <<'END'
# Unpacks, once, and runs bench/gpu_day.sh with the packages beside it.
here=$(cd "$(dirname "$0")" && pwd); export PYTHON="${PYTHON:-python3}"
unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
for part in tree site; do
  [ -d "$here/$part" ] || "$PYTHON" -c "$unpack" "$here/$part.txz" "$here/$part" || exit 1
done
PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}" exec bash "$here/tree/bench/gpu_day.sh" --out "$here/out" "$@"
END
"$python" -m pip download -q -d "$work/wheels" --no-deps --only-binary :all: --python-version 3.12 \
  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  cupy-cuda13x cuda-pathfinder fastrlock llvmlite "numpy<2.5" pyyaml platformdirs typer rich click \
  shellingham markdown-it-py mdurl pygments annotated-doc pytest pytest-timeout iniconfig packaging \
  pluggy hypothesis sortedcontainers
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
cd "$work/site"
rm -rf cupy/cuda/thrust* cupyx/{_cutensor,cusparse,cudnn,cusolver,cutensor}* cupyx/{scipy,distributed,profiler} \
  cupy_backends/cuda/libs/{cusparse,cusolver,cutensor,cusparselt,curand}* numpy/f2py ./*/tests ./*/*/tests
# not numpy's libraries, which stripping breaks: their sections were moved when the wheel was made
find cupy cupyx cupy_backends llvmlite -name '*.so' -exec strip --strip-unneeded {} + 2>/dev/null || true
# most of it is machine code, which a filter makes more alike
tar c . | xz -T2 --x86 --lzma2=preset=6,dict=32MiB >"$folder/site.txz"
bytes=$(du -sb "$folder" | cut -f1)
echo "$folder: $((bytes >> 20)) MiB, $(du -sb "$folder/site.txz" | cut -f1) bytes of them packages"
((bytes <= 64 << 20))
