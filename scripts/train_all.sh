#!/usr/bin/env bash
# Trains every kind of drafter on the same texts with the same recipe, for configs/compare_trained.py:
#
#   TEXTS=answers.jsonl bash scripts/train_all.sh DIR [--config.FIELD=VALUE ...]
#
# Into DIR/KIND go the runs of jspec.train; the same command goes on where it was. Each one learns three
# drafts a round from STEPS (150) batches of ROWS (2) rows of TOKENS (256); further flags go to all of
# them. The draft model begins as INIT_LAYERS of the target, as heads begin with its projection.
set -euo pipefail
workdir=${1:?"expected the folder to write, got nothing"}
texts=${TEXTS:?"expected TEXTS=FILE, answers of scripts/make_answers.py, got nothing"}
shift
[ -f "$texts" ] || { echo "error: no file $texts" >&2; exit 1; }

train() {  # KIND FLAGS: one drafter
  local kind=$1
  shift
  python -m jspec.train --config="configs/train_$kind.py" --workdir="$workdir/$kind" \
    --config.texts="('$texts',)" --config.recipe.num_steps="${STEPS:-150}" \
    --config.batch_size="${ROWS:-2}" --config.seq_len="${TOKENS:-256}" "$@"
}

train eagle --config.chain_steps=3 "$@"
train medusa --config.num_heads=3 "$@"
train blockwise --config.num_heads=3 "$@"
train lookahead --config.num_tokens=2 "$@"
train draft_model --config.chain_steps=3 --config.embeddings=shared \
  --config.init_layers="${INIT_LAYERS:-(0, 1, 28, 29)}" --config.num_layers=0 --config.embed_dim=0 \
  --config.hidden_dim=0 --config.num_heads=0 --config.num_kv_heads=0 "$@"
