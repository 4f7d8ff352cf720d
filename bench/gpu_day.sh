#!/usr/bin/env bash
# The first hour on a GPU: everything that no machine without one can show, cheapest first.
#
#   bench/gpu_day.sh [--rehearse] [--out FOLDER] [STEP...]     # steps 1 to 9; all of them by default
#   bench/gpu_day.sh --second [...]                            # two ranks on one card; see gpu_second.py
#
# Each step ends in a line and in FOLDER/STEP.json, and keeps its output in FOLDER/STEP.log; the
# first that is red ends the day. --rehearse runs the same steps without a GPU: kernels on the CPU,
# by the tests' shim, small sizes, doubles of torch.cuda and NCCL; what only a device can do is left
# out and named. A step takes at most ten minutes; PYTHON names an interpreter other than .venv's.
#
# For a bare machine with torch alone see bench/gpu_pack.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; }
out=gpu-day rehearse=0 steps=()
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CUBLAS_WORKSPACE_CONFIG=:4096:8
[ "${1:-}" = --second ] && exec "$PYTHON" -m bench.gpu_second "${@:2}"
while (($#)); do
  case $1 in
    --rehearse) rehearse=1 ;;
    --out) out=$2; shift ;;
    [1-9]) steps+=("$1") ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
  shift
done
((${#steps[@]})) || steps=(1 2 3 4 5 6 7 8 9)
mkdir -p "$out" bench/results
run() { timeout -k 10 590 "$@"; }
py() { run "$PYTHON" "$@"; }
tests() {
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 py -m pytest -q -p no:cacheprovider -p xdist -p timeout -W default \
    -o addopts=--import-mode=importlib "$@"
}

versions() { py -m bench.gpu_facts "${flag[@]}" --output "$out"; }
gpu_tests() {
  if ((rehearse)); then
    tests tests/compll/test_cuda_kept.py tests/casync/test_cuda_calls.py -m "not slow"
  else
    tests tests -k "gpu and not bad_access and not alone and not gpt2 and not measured and not test_gpu_code"
  fi
}
check() {
  if ((rehearse)); then
    py -m bench.gpu_check --rehearse --sizes 1,1000 --output "$out" int4_group onebit_group
  else
    py -m bench.gpu_check --sizes 1,1000,1048579 --output "$out" &&
      mv "$out/gpu_check.json" "$out/gpu_check_small.json" &&
      py -m bench.gpu_check --sizes 38600000 --output "$out"
  fi
}
speed() {
  if ((rehearse)); then
    tests tests/bench/test_gpu.py -m "not slow"
  else
    py -m bench.gpu --sizes 1,16,256,1024 --repeat 7 --output "$out"
  fi
}
demo() {
  local methods=hipress:int4_group,hipress:int4_group:transport=host device=cuda
  ((rehearse)) && methods=hipress:int4_group device=cpu
  if ! "$PYTHON" -c 'import matplotlib'; then
    echo "left out: the demo draws a chart, and matplotlib is not installed"
    return
  fi
  py -c 'from hipress.tools import main; main()' demo --loopback --hosts 2 \
    --steps $((rehearse ? 2 : 30)) --device $device --methods "$methods" --output "$out/demo"
}
step() {
  if ((rehearse)); then
    tests tests/bench/test_gpu_step.py
  else
    py -m bench.gpu_step int4_group onebit_group --ranks 2,8 --output "$out"
  fi
}
gpt2() { tests tests/hipress/test_gpt2.py -k "$( ((rehearse)) && echo emulated || echo gpu )"; }
nccl() { tests tests/casync/test_nccl_alone.py -k "$( ((rehearse)) && echo doubles || echo gpu )"; }
sanitize() {
  if ((rehearse)); then
    tests tests/compll/test_cuda_compile.py -m "not slow" && echo "left out: memcheck, racecheck, ncu"
    return
  fi
  if command -v compute-sanitizer >/dev/null; then
    tests tests/compll/test_cuda.py -k bad_access || return 1
    run compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m bench.gpu_check \
      --sizes 1000 --threads 1 --dtypes float32 --output "$out/race" onebit_group topk || return 1
  else
    echo "left out: compute-sanitizer is not installed"
  fi
  if command -v ncu >/dev/null; then
    for name in int4_group onebit_group topk dgc powersgd qsgd; do
      run ncu --set basic --csv "$PYTHON" -m bench.gpu "$name" --sizes 256 --repeat 1 \
        --output "$out/ncu" >"$out/ncu_$name.csv" || return 1
    done
  else
    echo "left out: ncu is not installed"
  fi
}

names=(- versions gpu_tests check speed demo step gpt2 nccl sanitize)
flag=(); ((rehearse)) && flag=(--rehearse)
mkdir -p "$out/race" "$out/ncu"
for number in "${steps[@]}"; do
  begin=$SECONDS name=${names[$number]}
  "$name" >"$out/$number.log" 2>&1; status=$?
  last=$(grep -v '^\s*$' "$out/$number.log" | tail -1)
  "$PYTHON" - "$number" "$name" $status $((SECONDS - begin)) "$rehearse" "$last" <<'END' >"$out/$number.json"
import json, sys
number, name, status, seconds, rehearsed, last = sys.argv[1:]
print(json.dumps({"step": int(number), "name": name, "green": status == "0", "status": int(status),
                  "seconds": int(seconds), "rehearsed": rehearsed == "1", "last": last}, indent=1))
END
  printf '(%s) %s: %s, %s s: %s\n' "$number" "$name" "$( ((status)) && echo RED || echo green )" \
    $((SECONDS - begin)) "$last"
  if ((status)); then
    tail -30 "$out/$number.log"
    exit "$status"
  fi
done
