#!/usr/bin/env bash
# One command for a machine with a GPU and no network, under 10 minutes: the distributions, then the times.
# Without a GPU it rehearses for up to 30.
#
#   scripts/gpu_session.sh [RESULTS_FOLDER] [TARGET]
#
# RESULTS_FOLDER is benchmarks/results/<date>-<backend> by default; RESULTS_FOLDER.tgz holds all of
# it in one file. TARGET is a model with real text (a folder or a .gguf file); without it only
# random weights run. On a machine without a GPU everything runs at small shapes, to test the
# session itself. jspec need not be installed; what else is missing is said, with what it costs.
#
# Every step ends after its share of LIMIT seconds at the latest, by its weight below; what does
# not fit is left out, and said to be. A program that is ended leaves a record of what it had
# measured by then, in which `is_complete` is false. STEPS names what is wanted. BACKEND=gpu refuses
# a machine on which JAX sees none.
#
#   LIMIT=550 (1800 without a GPU)
#   STEPS="distributions audits roofline synthetic peers options profile head drafters quantization"
#
# One call gives each step little. Where a call may take 10 minutes, make three:
#
#   STEPS="distributions audits profile" BACKEND=gpu scripts/gpu_session.sh a
#   STEPS="roofline synthetic" BACKEND=gpu scripts/gpu_session.sh b
#   STEPS="peers options drafters quantization" BACKEND=gpu scripts/gpu_session.sh c
#
# The shapes can be set, too:
#
#   PAIRS="target,draft ..." REPEATS=7 TESTS="tests/..." PYTHON=python3 PEERS="target,draft"
#   BENCHMARK_FLAGS="--num_prompts=4 --max_new_tokens=64" RULES="rejection block" NUM_ROWS=16384
#   COMPARE_FLAGS="--repeats=3" QUANTIZED="random:llama3.2-1b" SYNTHETIC_FLAGS="--drafters=..."
#   ROOFLINE_FLAGS="--quick" GPU_TESTS="tests/..." XLA_SETS="NAME=FLAG;FLAG NAME=FLAG ..."
#
# ANSWERS=answers.jsonl (of scripts/make_answers.py, with TARGET) trains a head of EAGLE-3, into
# RESULTS_FOLDER/eagle, with TRAIN_FLAGS; HEAD=FOLDER takes one that is there.
#
# Lists of words are split where they are used:
# shellcheck disable=SC2086
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# How much of the time a step gets beside the others; what one does not use goes to those after it.
declare -A weights=([distributions]=4 [audits]=3 [roofline]=6 [synthetic]=4 [peers]=3 [options]=3 [profile]=1
  [head]=4 [drafters]=3 [quantization]=2)
fail() { echo "error: $*" >&2; exit 2; }
case "${1:-}" in
  -h | --help) sed -n '2,/^set -/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) fail "expected a folder for the results, got $1" ;;
esac
[[ "${LIMIT:-1}" =~ ^[0-9]+$ ]] || fail "expected LIMIT as a number of seconds, got $LIMIT"
all_steps="distributions audits roofline synthetic peers options profile head drafters quantization"
steps=${STEPS:-$all_steps}
[ -n "${steps// /}" ] || fail "expected STEPS among $all_steps, got none"
for step in $steps; do
  [[ " $all_steps " == *" $step "* ]] && continue
  fail "expected STEPS among $all_steps, got $step"
done
[ -n "${ANSWERS:-}" ] || steps=" $steps " steps=${steps/ head / }
if [ -n "${ANSWERS:-}" ] && [ -z "${2:-}" ]; then
  fail "expected TARGET with ANSWERS: whose answers they are"
fi

backend=$("$python" -c '
import jax
try:
    print(jax.default_backend())
except RuntimeError:
    print("none")')
if [ "$backend" = none ] || [ "$backend" != "${BACKEND:-$backend}" ]; then
  fail "expected a machine on which JAX's backend is ${BACKEND:-there}, got $backend"
fi
"$python" -c '
import importlib.util
costs = {"beartype": "types go unchecked in the distributions", "gguf": "no .gguf file can be read",
         "hypothesis": "fewer distributions", "matplotlib": "no pictures", "pytest": "no distributions",
         "ml_collections": "no head is trained", "scipy": "fewer distributions",
         "torch": "nothing of transformers", "transformers": "nothing of it"}
missing = [f"{name} ({cost})" for name, cost in costs.items() if not importlib.util.find_spec(name)]
print("missing here:", ", ".join(missing) or "nothing")'
out=${1:-benchmarks/results/$(date +%F)-$backend}
target=${2:-}
real=${target:-random:smollm2-135m}
mkdir -p "$out"

if [ "$backend" = gpu ]; then
  limit=${LIMIT:-550}
  pairs=${PAIRS:-random:llama3.2-3b,random:llama3.2-1b random:llama3.1-8b,random:llama3.2-1b}
  repeats=${REPEATS:-7}
  gpu_tests=${GPU_TESTS:-tests/test_gpu.py}
  tests=${TESTS:-tests/speculation/test_lossless.py tests/speculation/test_greedy_parity.py
    tests/speculation/test_cache_consistency.py tests/speculation/test_seeds.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=3 --num_prompts=4 --max_new_tokens=64}
  rules=${RULES:-rejection block coupled}
  num_rows=${NUM_ROWS:-16384}
  peers=${PEERS:-random:llama3.2-3b,random:llama3.2-1b}
  compare_flags=${COMPARE_FLAGS:---repeats=3 --per_category=5 --max_new_tokens=64}
  quantized=${QUANTIZED:-random:llama3.2-1b random:llama3.1-8b}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2,model:5 --num_prompts=2 --repeats=3
    --max_new_tokens=64 --synthetic_acceptance=0.6,0.7,0.8,0.9}
else
  echo "no GPU here (JAX's backend is $backend): a rehearsal at small shapes, for no times"
  limit=${LIMIT:-1800}
  pairs=${PAIRS:-random:smollm2-135m,random:smollm2-135m:1}
  repeats=${REPEATS:-1}
  gpu_tests=${GPU_TESTS:-tests/test_gpu.py -k plain_decodings}
  tests=${TESTS:-tests/drafters/test_prompt_lookup.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=1 --num_prompts=1 --max_new_tokens=8}
  rules=${RULES:-rejection}
  num_rows=${NUM_ROWS:-2048}
  peers=${PEERS:-random:smollm2-135m,random:smollm2-135m:1}
  compare_flags=${COMPARE_FLAGS:---repeats=1 --per_category=1 --max_new_tokens=8}
  quantized=${QUANTIZED:-random:smollm2-135m}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2 --num_prompts=1 --repeats=1
    --max_new_tokens=8 --synthetic_acceptance=0.8}
fi
roofline_flags=${ROOFLINE_FLAGS:---quick}
# XLA_FLAGS must not be blank: autotuning at level 4 is XLA's own choice.
xla_sets=${XLA_SETS:-default= loops=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL
  none=--xla_gpu_enable_command_buffer= triton=--xla_gpu_triton_gemm_any=true}

# The rest runs even where a step fails; the status says it at the end.
status=0

# A step names all that it will run, word by word: each program gets a share of the step's time.
will_run() { parts=$#; }

# COMMAND, within the step's time: half more than its even share, where others follow.
run() {
  local left=$((until - SECONDS)) code=0
  [ "$parts" -le 1 ] || left=$((3 * left / (2 * parts)))
  parts=$((parts - 1))
  if [ "$left" -lt 5 ]; then
    echo "left out, its time is over: $*"
    status=1
    return 1
  fi
  timeout -k 10 "$left" "$@" || code=$?
  [ "$code" != 0 ] || return 0
  case $code in
    124 | 137) echo "ended after $left s: $*" ;;
    *) echo "failed, with status $code: $*" ;;
  esac
  status=1
  return 1
}

benchmark() { run "$python" -m jspec.benchmark "$@" || true; }

short() { echo "${1#random:}"; }

distributions() { # compiled as users get it; a newer JAX may warn of what it is going to drop
  local log=$out/distributions.txt options="-v -rN --tb=short -W default"
  will_run gpu_tests tests
  : >"$log"
  JSPEC_TEST_OPTIMISED=1 run "$python" -u -m pytest $options -m gpu $gpu_tests >>"$log" 2>&1 || true
  JSPEC_TEST_OPTIMISED=1 run "$python" -u -m pytest $options $tests >>"$log" 2>&1 || true
  echo "passed: $(grep -c ' PASSED ' "$log")" || true
  grep -E " (FAILED|ERROR) |^(left out|failed|ended)" "$log" || true
}

audits() {
  local rule dtype
  will_run $rules $rules
  for dtype in float32 bfloat16; do
    for rule in $rules; do
      run "$python" -m jspec.audit --target="$real" --acceptance="$rule" --num_rows="$num_rows" \
        --dtype="$dtype" --output_json="$out/audit-$rule-$dtype.json" || true
    done
  done
}

roofline() { # the parts of a round; a draft is measured with the first target that has it
  local pair big small seen=" "
  will_run $pairs
  for pair in $pairs; do
    big=${pair%,*} small=${pair#*,}
    if [[ "$seen" == *" $small "* ]]; then
      benchmark --measure=roofline --target="$big" --drafters=none,prompt_lookup:4 $roofline_flags \
        --output_json="$out/roofline-$(short "$big").jsonl"
    else
      benchmark --measure=roofline --target="$big" --draft="$small" $roofline_flags \
        --drafters=none,prompt_lookup:4,model:4 --output_json="$out/roofline-$(short "$big").jsonl"
      seen+="$small "
    fi
  done
}

synthetic() { # speed against acceptance, beside Theorem 3.8
  local pair quantization
  will_run $pairs $pairs
  for pair in $pairs; do
    for quantization in none int8; do
      benchmark --measure=synthetic --target="${pair%,*}" --draft="${pair#*,}" \
        --draft_quantization="$quantization" $synthetic_flags --output_json="$out/synthetic-$(short "${pair%,*}")-$quantization.jsonl"
    done
  done
}

peers() { # transformers: plain, compiled over a static cache, prompt lookup, assisted generation
  local pair
  will_run $peers
  for pair in $peers; do # torch needs room beside JAX
    XLA_PYTHON_CLIENT_PREALLOCATE=false benchmark --target="${pair%,*}" --draft="${pair#*,}" \
      --drafters=none,prompt_lookup:5,model:5 --transformers --compiled \
      $benchmark_flags --output_json="$out/peers-$(short "${pair%,*}").jsonl"
  done
}

options() { # what XLA's options change; +WHILE puts whole loops into one launch
  local set
  will_run $xla_sets
  for set in $xla_sets; do
    XLA_FLAGS="${XLA_FLAGS:---xla_gpu_autotune_level=4} $(tr ';' ' ' <<<"${set#*=}")" benchmark \
      --notransformers --target="${pairs##*,}" --drafters=none,prompt_lookup:5 $benchmark_flags \
      --output_json="$out/options-${set%%=*}.jsonl"
  done
}

profile() {
  benchmark --measure=profile --target="${pairs##*,}" --drafters=prompt_lookup:5 \
    --max_new_tokens=32 --trace_folder="$out/profile" --output_json="$out/profile.jsonl"
}

head=${HEAD:-}

head() {
  will_run train convert
  run "$python" -m jspec.train --config=configs/train_eagle.py --config.target="$target" \
    --config.texts="(\"$ANSWERS\",)" --workdir="$out/training" \
    ${TRAIN_FLAGS:---config.batch_size=16 --config.recipe.num_steps=2000} || return 0
  run "$python" -m scripts.convert_weights --source="$out/training/head" --dtype=int8 \
    --output="$out/eagle" || return 0
  head=$out/eagle
}

drafters() { # real text, where TARGET is given
  will_run drafting drafters
  benchmark --measure=drafting --target="$real" --num_draft_tokens=4 --repeats="$repeats" \
    --output_json="$out/drafting.jsonl"
  benchmark --decoding --target="$real" \
    --drafters="none,prompt_lookup:1,prompt_lookup:3,prompt_lookup:7,prompt_lookup:auto,ngram\
,layer_skip:2,eagle:1,eagle:3,eagle:5,prompt_lookup+eagle:2" --draft_layers=20 \
    --draft_head="${head:-shipped:smollm2-135m-instruct}" $compare_flags \
    --output_json="$out/drafters.jsonl"
}

quantization() {
  local model
  will_run $quantized
  for model in $quantized; do
    benchmark --measure=quantization --target="$model" --repeats="$repeats" \
      --output_json="$out/quantization-$(short "$model").jsonl"
  done
}

total=0
for step in $steps; do total=$((total + weights[$step])); done
for step in $all_steps; do
  [[ " $steps " == *" $step "* ]] || continue
  until=$((SECONDS + (limit - SECONDS) * weights[$step] / total))
  total=$((total - weights[$step]))
  parts=1
  echo "== $step, at most $((until - SECONDS)) s"
  "$step"
done

# Pictures need matplotlib; without it, or on another machine, the same command does it later.
shopt -s nullglob
records=("$out"/roofline-*.jsonl "$out"/synthetic-*.jsonl)
[ ${#records[@]} = 0 ] ||
  timeout -k 2 15 "$python" -m jspec.benchmark --draw="$(IFS=,; echo "${records[*]}")" || true

# One file is easier to bring back than many; the training's checkpoints are large.
tar -czf "$out.tgz" --exclude=training -C "$(dirname "$out")" "$(basename "$out")"
echo "results in $out and $out.tgz, $SECONDS s, status $status"
exit "$status"
