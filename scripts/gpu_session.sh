#!/usr/bin/env bash
# Checks and measures jspec on a machine with a GPU and no network, in parts of under nine minutes.
#
#   scripts/gpu_session.sh [--rehearse] [--results=FOLDER] [--models=FOLDER] [--only=STEP,...] PART...
#
#   correctness  the GPU's tests: audits, the coupled rule's one text for all drafters, the
#                candidates beside XLA, prefill, packed weights; an audit of SmolLM2
#   profile      kernels and copies of a round: those that a profiler sees, and the compiler's
#   shapes       plain and speculative rounds of 1B and 3B, 1B by XLA alone; 3B with 1B by given acceptance, beside Theorem 3.8
#   more         rounds of 8B, and of 1B not in one graph
#   pair         the pair of Qwen2.5-Coder beside transformers, or else SmolLM2 with its head
#   peers        transformers (its cache static, its step compiled) and vLLM, random weights
#   roofline     estimated and measured times; it needs no GPU, but the extra compile-gpu
#
# Parts run in this order, and take 34 minutes at most together. Each step has seconds of its own,
# and one that fails or is ended stops no other; the status is 1 then. --rehearse runs the same steps
# on whatever is there, with tiny models, in four times as long at most. jspec need not be installed,
# but what it imports.
#
# --results is a new folder, an empty one, or one to go on in: by default, in the repository,
# benchmarks/results/DATE-BACKEND, of a rehearsal DATE-BACKEND-rehearsal. Its steps.jsonl says how
# each step went as soon as it has ended; NAME.txt is what a step printed; FOLDER.tgz holds all of it.
# --models holds files of published models, whole or in parts (FILE.00, FILE.01, ...). --only names
# steps, as steps.jsonl does: no others are run.
set -euo pipefail
declare -A limits=(
  [correctness]=510 [profile]=140 [shapes]=530 [more]=230 [pair]=180 [peers]=200 [roofline]=150
)
all_parts="correctness profile shapes more pair peers roofline"
fail() { echo "error: $*" >&2; exit 2; }

rehearse="" out="" models="" only="" seen="" parts=()
for word in "$@"; do
  case $word in
    -h | --help) sed -n '2,/^set -/s/^# \{0,1\}//p' "$0"; exit ;;
    --rehearse) rehearse=1 ;;
    --results=?*) out=$(realpath -m "${word#*=}") ;; # in the caller's folder, not the repository
    --models=?*) models=${word#*=} ;;
    --only=?*) only=${word#*=} ;;
    -*) fail "expected --rehearse, --results=, --models=, --only= or parts; got $word" ;;
    *) [[ " $all_parts " == *" $word "* ]] || fail "expected parts among $all_parts; got $word"
      parts+=("$word") ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || fail "expected parts among $all_parts; got none"
[ -z "$models" ] || [ -d "$models" ] || fail "expected a folder in --models, got $models"
models=${models:+$(realpath "$models")}
python=$(command -v "${PYTHON:=python3}") || fail "expected PYTHON to be a program, got $PYTHON"
python=$(realpath -s "$python") # a link in a virtual environment has to stay one
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" JSPEC_CACHE="${JSPEC_CACHE:-$HOME/.cache/jspec}"
export HF_HUB_OFFLINE=1 # nothing is asked of a hub, nor waited for
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT

# JAX's backend; the published models that are there; date, versions and hardware.
lines=$("$python" -c '
import importlib.util, json, os, pathlib, sys
import jax
from jspec.common.errors import InputError
from jspec.kernels import check_device
try:
    check_device()
except InputError as error:
    sys.exit(str(error))
print(backend := jax.default_backend())
if backend == "gpu":
    os.environ["JSPEC_NATIVE"] = "0"  # the C++ for CPUs takes a while to compile
from jspec.common.user_cache import cache_dir
from jspec.generation.provenance import environment
from jspec.weights.published import MODELS

def is_there(model):
    path = cache_dir() / "models" / model.file
    parts = sorted(pathlib.Path(sys.argv[1]).glob(model.file + "*")) if sys.argv[1] else []
    if not path.exists() and sum(part.stat().st_size for part in parts) == model.num_bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path.exists()

print(*(name for name, model in MODELS.items() if is_there(model)))
packages = "beartype gguf hypothesis matplotlib pytest scipy torch transformers xdist".split()
missing = [name for name in packages if importlib.util.find_spec(name) is None]
print(json.dumps(environment() | {"missing": missing}))' "$models" 2>"$errors") ||
  fail "$python said: $(tail -n 1 "$errors")"
grep "^jspec: " "$errors" >&2 || true # why a GPU is not used
mapfile -t found <<<"$lines"
backend=${found[0]}
if [ "$backend" != gpu ] && [ -z "$rehearse" ] && [ "${parts[*]}" != roofline ]; then
  fail "expected a GPU that JAX can use, or --rehearse; JAX's backend is $backend"
fi
[ "$backend" != gpu ] || export JSPEC_NATIVE=0
out=${out:-benchmarks/results/$(date +%F)-$backend${rehearse:+-rehearsal}}
own=$out/${rehearse:+rehearsal-}environment.json # a rehearsal goes on in no session's folder
[ ! -d "$out.tgz" ] || fail "expected a file or nothing at $out.tgz, got a folder"
mkdir -p "$out" 2>/dev/null || fail "expected a folder that can be made in --results, got $out"
if [ -f "$own" ]; then
  echo "goes on in $out"
elif [ -n "$(ls -A "$out")" ]; then
  fail "expected an empty folder, or one that holds ${own##*/}, in --results; got $out"
else # every record that jspec writes holds it, too
  { echo "${found[2]}" >"$own"; } 2>/dev/null || fail "expected to write in --results, got $out"
fi
has() { [[ " ${found[1]} " == *" $1 "* ]]; } # MODEL
lacks() { [[ "${found[2]#*missing}" == *"\"$1\""* ]]; } # PACKAGE

small=random:llama3.2-1b middle=random:llama3.2-3b large=random:llama3.1-8b scale=1
num_rows=4096 repeats=3 tokens=64 prompts=4 select=()
if [ -n "$rehearse" ]; then
  scale=4 num_rows=512 repeats=1 tokens=8 prompts=1
  select=(-k "plain_decodings or leaves or no_numbers or hole or weights_are_those")
  small=$out/tiny-1b middle=$out/tiny-3b large=$out/tiny-8b
  # Sizes that all kernels take.
  [ -d "$small" ] || JAX_PLATFORMS=cpu "$python" -c '
import pathlib, sys
from tests.tiny_models import save_folder
save_folder(pathlib.Path(sys.argv[1]), embed_dim=64, hidden_dim=96, head_dim=32, max_seq_len=2048)' "$small"
  ln -sfn tiny-1b "$middle" # one model by three names, as three models have
  ln -sfn tiny-1b "$large"
fi
status=0 part="" until=0

# note STEP OUTCOME LIMIT SECONDS [SAID]: a line for people, and one of JSON on the disk.
note() {
  echo "$part, $1: $2${5:+: $5}"
  "$python" -c '
import datetime, json, sys
keys = "part", "step", "outcome", "limit", "seconds", "said"
record = dict(zip(keys, sys.argv[1:])) | {"date": datetime.datetime.now().isoformat("T", "seconds")}
print(json.dumps(record | {key: int(record[key]) for key in ("limit", "seconds")}))' \
    "$part" "$1" "$2" "$3" "$4" "${5:-}" >>"$out/steps.jsonl"
}

# is_wanted STEP: by --only.
is_wanted() {
  seen+=",$1"
  [ -z "$only" ] || [[ ,$only, == *",$1,"* ]]
}

leave_out() { ! is_wanted "$1" || note "$1" "left out" 0 0 "$2"; } # STEP REASON

# step NAME SECONDS COMMAND...: runs it for that long at most; what it prints is NAME.txt.
step() {
  local name=$1 most=$(($2 * scale)) left=$((until - SECONDS)) begin=$SECONDS code=0 outcome=failed said
  is_wanted "$name" || return 0
  shift 2
  [ "$most" -lt "$left" ] || most=$left
  if [ "$most" -lt 2 ]; then
    status=1
    leave_out "$name" "the time of its part is over"
    return
  fi
  timeout -k 10 "$most" "$@" >"$out/$name.txt" 2>&1 || code=$?
  said=$(tail -n 1 "$out/$name.txt" | sed -E 's/^=+ | =+$//g' | cut -c 1-300)
  case $code in
    0)
      outcome="done"
      [[ $said =~ [0-9]\ passed|^lossless ]] || said="" # else the end of a table
      ;;
    124 | 137) outcome="ended" status=1 ;;
    *) status=1 ;;
  esac
  note "$name" "$outcome" "$most" $((SECONDS - begin)) "$said"
}

# Compiled as users get it; a newer JAX may warn of what it is going to drop.
tests=(env JSPEC_TEST_OPTIMISED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false)
# Right is right by any tiling: trying them took most of the time.
tests+=(XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}")
tests+=("$python" -u -m pytest -v -rN --tb=short -W default "${select[@]}")
workers=$(($(nproc) / 2)) # a process compiles with more than one core
[ "$workers" -lt 8 ] || workers=8
if [ "$workers" -gt 1 ] && ! lacks xdist; then tests+=(-n "$workers"); fi

# benchmark NAME SECONDS FLAGS...
benchmark() { step "$1" "$2" "$python" -u -m jspec.benchmark "${@:3}" --output_json="$out/$1.jsonl"; }

correctness() {
  local real=smollm2-135m-instruct
  step seeds 120 "${tests[@]}" -m gpu tests/test_gpu.py -k seeds
  JSPEC_ONE_GRAPH=0 step seeds-no-graph 110 "${tests[@]}" -m gpu tests/test_gpu.py -k seeds
  step gpu-tests 170 "${tests[@]}" -m gpu tests/test_gpu.py -k "not seeds"
  step kernel-tests 40 "${tests[@]}" tests/kernels/test_contest.py
  step cache-tests 30 "${tests[@]}" tests/speculation/test_cache_consistency.py
  if lacks gguf; then
    leave_out packed-tests "gguf is not installed"
  else
    step packed-tests 15 "${tests[@]}" tests/kernels/test_packed.py
  fi
  [ -z "$rehearse" ] || real=$small
  if [ -n "$rehearse" ] || has $real; then # the draft is the target itself, rounded
    step audit 25 "$python" -u -m jspec.audit --target="$real" --draft="$real" --dtype=bfloat16 \
      --draft_quantization=int8 --num_rows="$num_rows" --output_json="$out/audit.jsonl"
  else
    leave_out audit "no file of $real"
  fi
}

profile() {
  benchmark profile-plain 55 --measure=profile --target="$small" --drafters=none
  benchmark profile-pair 85 --measure=profile --target="$middle" --draft="$small" --drafters=model:4
}

rounds=(--measure=roofline --quick)

shapes() {
  benchmark rounds-1b 110 "${rounds[@]}" --target="$small" --drafters=none,prompt_lookup:4
  benchmark rounds-3b 200 "${rounds[@]}" --target="$middle" --draft="$small" \
    --drafters=none,prompt_lookup:4,model:4
  # Named so that roofline takes only what is compiled as its estimates are.
  JSPEC_KERNELS=xla benchmark unfused-rounds-1b 80 "${rounds[@]}" --target="$small" \
    --drafters=none,prompt_lookup:4
  benchmark synthetic-3b 100 --measure=synthetic --target="$middle" --draft="$small" \
    --drafters=none,model:2,model:4 --num_prompts="$prompts" --repeats="$repeats" \
    --max_new_tokens="$tokens"
}

more() {
  benchmark rounds-8b 120 "${rounds[@]}" --target="$large" --drafters=none,prompt_lookup:4
  JSPEC_ONE_GRAPH=0 benchmark no-graph-rounds-1b 110 "${rounds[@]}" --target="$small" \
    --drafters=none,prompt_lookup:4
}

# torch needs room beside JAX.
peer=(--measure=methods --num_prompts="$prompts" --repeats="$repeats" --max_new_tokens="$tokens")
beside() { XLA_PYTHON_CLIENT_PREALLOCATE=false benchmark "$1" "$2" "${peer[@]}" "${theirs[@]}" "${@:3}"; }
theirs=(--transformers --compiled)
if lacks torch || lacks transformers; then theirs=(--notransformers); fi

pair() {
  local target=qwen2.5-coder-1.5b-instruct draft=qwen2.5-coder-0.5b-instruct
  [ -z "$rehearse" ] || target=$small draft=$small
  if [ -n "$rehearse" ] || { has $target && has $draft; }; then
    beside pair 170 --target="$target" --draft="$draft" --drafters=none,prompt_lookup:5,model:5
    return
  fi
  leave_out pair "no files of $target and $draft: --models, or jspec's cache"
  target=smollm2-135m-instruct
  if has $target; then
    beside smollm2 170 --target=$target --drafters=none,prompt_lookup:5,prompt_lookup+eagle:2
  else
    leave_out smollm2 "no file of $target"
  fi
}

peers() {
  beside peers-3b 130 --target="$middle" --draft="$small" --drafters=none,prompt_lookup:5,model:5
  if [ "${theirs[*]}" = --notransformers ]; then leave_out transformers "torch is not installed"; fi
  if ! command -v vllm >/dev/null; then
    leave_out vllm "it is not installed"
    return
  fi
  # Random weights of the same shape: of the folder only the config is read.
  "$python" -c '
import json, pathlib, sys
from jspec.models.families.hf_config import to_hf_config
from jspec.evaluation.analysis.byte_model import load_config
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
config = to_hf_config(load_config(sys.argv[2].removeprefix("random:")))
(folder / "config.json").write_text(json.dumps(config))' "$out/vllm" "$middle"
  step vllm-3b 70 vllm bench latency --model "$out/vllm" --load-format dummy --skip-tokenizer-init \
    --dtype bfloat16 --input-len 64 --output-len "$tokens" --batch-size 1 --output-json "$out/vllm-3b.json"
}

# estimate NAME SECONDS RECORD FLAGS...: what a compiler expects of programs that shapes measured.
estimate() {
  local record=$out/rounds-$3.jsonl
  if [ -f "$record" ]; then
    step "estimate-$1" "$2" "$python" -m scripts.compile_for --device="$device" --cache=512 \
      "${@:4}" --output_json="$out/estimate-$1.jsonl"
  else
    leave_out "estimate-$1" "shapes has left no $(basename "$record") in $out"
  fi
}

roofline() {
  local device
  device=$(grep -oEhi 'h200|h100|a100' "$out"/rounds-*.jsonl 2>/dev/null | head -n 1) || true
  device=${device:-h200} device=${device,,}
  estimate 1b 25 1b --target="$small" --drafter=none --programs=run,call:1,call:6,prefill:256
  estimate 3b 25 3b --target="$middle" --drafter=none --programs=run,call:6,prefill:256
  estimate 3b-with-1b 65 3b --target="$middle" --draft="$small" --num_draft_tokens=4
  estimate 8b 25 8b --target="$large" --drafter=none --programs=run,call:6
  step roofline 10 "$python" -m scripts.compare_times "$out"
  [ -z "$rehearse" ] || echo "a rehearsal's ratios mean nothing: tiny models on $backend beside $device" \
    >>"$out/roofline.txt"
  sed -n '/estimated µs/,$p' "$out/roofline.txt" # without what JAX says of a GPU that is not there
}

for part in $all_parts; do
  [[ " ${parts[*]} " == *" $part "* ]] || continue
  until=$((SECONDS + limits[$part] * scale))
  echo "== $part, at most $((until - SECONDS)) s"
  "$part"
done

for name in ${only//,/ }; do
  [[ $seen, == *",$name,"* ]] || fail "expected steps among ${seen:1} in --only, got $name"
done
# One file is easier to bring back than many.
tar -czf "$out.tgz" --exclude='tiny-*' -C "$(dirname "$out")" "$(basename "$out")"
echo "results in $out and $out.tgz, $(du -k "$out.tgz" | cut -f 1) kB, $SECONDS s, status $status"
exit "$status"
