#!/bin/sh
# A federation of four members and a coordinator, all on this machine, each with processes and a folder of its own.
#
#     sh examples/deployment/loopback.sh DIR [PORT]
#
# It needs secure-fed[flower]. Everything is under DIR; all processes end with this script.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
link="127.0.0.1:${2:-8000}"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
started=""
trap 'kill $started 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

python "$here/notes.py" "$dir" 4
cp "$here/run.toml" "$dir/run.toml"

# The coordinator makes its key; each owner of a node gives that key's fingerprint, and sends the card back.
coordinator=$(secure-fed coordinator init "$dir/coordinator")
for n in 1 2 3 4; do
    secure-fed node init "$dir/node-$n" --train "$dir/notes-$n.jsonl" --coordinator "$coordinator" --units 600
done
cd "$dir"
secure-fed coordinator found coordinator --name clinics --config run.toml node-*/card.json
secure-fed flower init app --coordinator coordinator --superlink "$link" --insecure

flower-superlink --insecure --host 127.0.0.1 --port "${link#*:}" --database superlink.db \
    --disable-runtime-dependency-installation >superlink.log 2>&1 &
started="$started $!"
for n in 1 2 3 4; do
    secure-fed node run "node-$n" --superlink "$link" --insecure &
    started="$started $!"
done
until python -c "import socket; socket.create_connection(('127.0.0.1', ${link#*:}), 1)" 2>/dev/null; do sleep 1; done
secure-fed flower run app

secure-fed node status node-1
secure-fed export coordinator/run adapter
