#!/usr/bin/env bash
# Trains every kind of drafter on the same texts with the same recipe, for configs/compare_trained.py:
#
#   TEXTS=answers.jsonl bash scripts/train_all.sh DIR [--config.FIELD=VALUE ...]
#
# Into DIR/KIND go the runs of jspec.train; the same command goes on where it was. STEPS (200), ROWS
# (2) and TOKENS (256, of a row) set how much each one sees; further flags go to all of them. The draft
# model begins as four layers of the target, as heads begin as its projection.
set -euo pipefail
workdir=${1:?"expected the folder to write, got nothing"}
texts=${TEXTS:?"expected TEXTS=FILE, answers of scripts/make_answers.py, got nothing"}
shift
[ -f "$texts" ] || { echo "error: no file $texts" >&2; exit 1; }

for kind in eagle medusa blockwise lookahead draft_model; do
  own=()
  [ "$kind" = draft_model ] && own=(
    "--config.init_layers=${INIT_LAYERS:-(0, 1, 28, 29)}" --config.embeddings=shared
    --config.num_layers=0 --config.embed_dim=0 --config.hidden_dim=0 --config.num_heads=0
    --config.num_kv_heads=0
  )
  python -m jspec.train --config="configs/train_$kind.py" --workdir="$workdir/$kind" \
    --config.texts="('$texts',)" --config.recipe.num_steps="${STEPS:-200}" \
    --config.batch_size="${ROWS:-2}" --config.seq_len="${TOKENS:-256}" "${own[@]}" "$@"
done
