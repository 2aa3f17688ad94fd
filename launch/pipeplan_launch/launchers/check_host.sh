# shellcheck shell=bash disable=SC2154 # launchers/ssh_connection.py sets the variables that are not set here
# Can this host take part? Prints `ok ADDRESS PORT`, or one line that says what is wrong.
fail() {
  printf '%s\n' "$1"
  exit 0
}
[[ -d "$folder" ]] || fail "has no folder $folder; --copy brings the plan there"
[[ -f "$folder/launch.sh" ]] || fail "has no launch.sh in $folder; --copy brings the plan there"
grep -qsF "$digest" "$folder/stages/stage-0.json" || fail "has another plan in $folder; --copy brings this one there"
[[ -z "$copy" ]] || mkdir -p -- "$workdir"
cd -- "$workdir" 2>/dev/null || fail "has no folder $workdir to work in; --workdir names another"

# A port to which nothing answers. The first host proposes it as MASTER_PORT.
if [[ -z "$port" ]]; then
  port=$((20000 + RANDOM % 10000))
  while (exec 4<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
fi
export MASTER_ADDR=localhost MASTER_PORT="$port" PIPEPLAN_ONLY_CHECK=1
problem="$("$folder/launch.sh" "${arguments[@]}" 2>&1 >/dev/null </dev/null)" || fail "${problem##*$'\n'}"
"$python" -c 'import pipeplan_launch.launchers.host_supervisor' 2>/dev/null ||
  fail "cannot import pipeplan_launch.launchers by $python; python= in the hosts file names another interpreter"

read -r _ _ address _ <<<"${SSH_CONNECTION:-}" # the address by which ssh reached this host
printf 'ok %s %s\n' "${address:--}" "$port"
