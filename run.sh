#!/usr/bin/env bash
# Tests, the demo and the checks; each makes the virtual environment that it needs. `bash run.sh help` lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
trap 'exit 130' INT # pip catches Ctrl-C and ends as if it had merely failed

usage() {
  cat <<'EOF'
bash run.sh [test ARGS]   the tests but the slow ones, in parallel; ARGS go to pytest
bash run.sh all [ARGS]    all tests: those of documents, notebooks, examples and whole workloads, too
bash run.sh demo [ARGS]   two minutes of training, explained: jaxpruner demo; ARGS go to it, try --help
bash run.sh docs [ARGS]   the site, from nothing, into site/; ARGS go to sphinx-build
bash run.sh lint          ruff, pyright and the import contracts
bash run.sh lowest        the tests but the slow ones and those of benchmarks, documents and examples, with the oldest versions that are allowed; needs Python 3.11
bash run.sh package       dist/: source and wheel, checked, and the wheel tried in a fresh environment; installs 1 GB
bash run.sh integrations [NAME ...]
                          the scripts for dopamine, kauldron, tunix, maxtext, levanter, keras-hub and brax, or for those named;
                          installs 14 GB, TensorFlow twice

The environments are .venv and .venv-docs, -lowest, -package and one for each integration here. A second run finds them made; to make them anew, delete them.
PYTHON=...  the Python that makes them (otherwise the newest that is tested: python3.13, python3.12, one of pyenv's, python3.11)
JOBS=...    how many tests run at once (otherwise as many as there are cores, at most 8)
EOF
}

fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}

# find_python CONDITION WORDS: sets `python` to the first Python whose `version` (major, minor) meets the condition.
# Newer Pythons come first, since JAX drops old ones. Those not yet tested come last.
find_python() {
  local condition=$1 words=$2 candidate version found=""
  local candidates=(python3.13 python3.12 $(pyenv_pythons) python3.11 python3 python3.14 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    found+="${found:+, }$candidate is $version"
    if "$candidate" -c "import sys; version = sys.version_info[:2]; sys.exit(not ($condition))"; then
      python=$candidate
      "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv or ensurepip module; on Debian and Ubuntu: apt install python3-venv"
      echo "run.sh: Python is $("$python" -c 'import platform; print(platform.python_version())') ($python)" >&2
      return
    fi
  done
  fail "needs $words; ${found:-none of ${candidates[*]} runs}. Name another with PYTHON=/path/to/python"
}

# pyenv has Pythons that are not on PATH. Its names in PATH fail for those that are not switched on.
pyenv_pythons() {
  command -v pyenv >/dev/null || return 0
  pyenv versions --bare | grep -E '^3\.(12|13)\.[0-9]+$' | sort -rV | sed "s|.*|$(pyenv root)/versions/&/bin/python|"
}

# environment DIRECTORY NAME PIP-ARGUMENTS: makes the environment and installs into it, unless that is done.
environment() {
  if command -v flock >/dev/null; then flock 9; fi # a second run waits for the first to end installing
  local directory=$1 stamp=$1/$2.installed; shift 2
  local place wanted
  place="$("$python" -VV) $PWD" # an environment breaks when its Python changes or its folder moves
  wanted="$* $(cat pyproject.toml ci/*.txt | cksum)"

  if [ -e "$directory" ]; then
    if [ -e "$directory/unfinished" ] || [ "$(cat "$directory/place" 2>/dev/null)" != "$place" ]; then
      echo "run.sh: $directory is unfinished or was made for another Python or place; making it anew" >&2
      rm -rf "$directory"
    elif [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
      return
    fi
  fi

  mkdir -p "$directory"
  touch "$directory/unfinished"
  if [ ! -e "$directory/place" ]; then
    echo "run.sh: making $directory with $("$python" -V)" >&2
    "$python" -m venv "$directory" || fail "$python could not make a virtual environment"
    printf '%s\n' "$place" >"$directory/place"
  fi
  echo "run.sh: installing $*" >&2
  if ! "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; then
    rm "$directory/unfinished" # pip has taken back what it could not finish
    fail "pip could not install: its reason stands above. It has to reach a package index such as PyPI"
  fi
  printf '%s\n' "$wanted" >"$stamp"
  rm "$directory/unfinished"
} 9>.run.lock

any_python() { find_python 'version >= (3, 11)' "Python 3.11 or newer"; }

# tests_environment NAME EXTRAS: .venv with the newest JAX. gymnax 1.0.1 runs with JAX 0.12 but asks pip for an older one.
tests_environment() {
  environment .venv "$1" -e ".[$2]"
  environment .venv "$1-jax" --upgrade --no-deps jax jaxlib
}

# wanted NAME: whether `run.sh integrations` was asked for it, by name or for all.
wanted() { [[ $chosen == *" $1 "* || $chosen == "  " ]]; }

# integrate NAME SCRIPT PACKAGES: runs a script in its environment, and adds its line to the table.
integrate() {
  local runs=.venv-$1/bin/python script=$2 start=$SECONDS result=passes; shift 2
  "$runs" "examples/integrations/$script.py" || { result=FAILS; status=1; }
  table+="| $script | $result | $((SECONDS - start)) s | $("$runs" -c 'import platform, sys; from importlib import metadata
print("Python " + ", ".join([platform.python_version(), *(f"{name} {metadata.version(name)}" for name in sys.argv[1:])]))' jax "$@") |"$'\n'
}

parallel=(-n "${JOBS:-auto}" --maxprocesses=8 --dist worksteal) # neighbours share what they have compiled

command=${1:-test}
[ $# -eq 0 ] || shift
case $command in
  test)
    any_python
    tests_environment test games,test
    echo "run.sh: slow tests (documents, notebooks, examples, whole workloads) are left out: bash run.sh all" >&2
    exec .venv/bin/python -m pytest "${parallel[@]}" -m 'not slow' "$@"
    ;;
  all)
    any_python
    tests_environment test games,test
    exec .venv/bin/python -m pytest "${parallel[@]}" "$@"
    ;;
  demo)
    any_python
    [ -e .venv/demo.installed ] || echo "run.sh: first some packages are installed (1 GB); then two minutes of training" >&2
    environment .venv demo -e '.[baselines]'
    .venv/bin/jaxpruner demo "$@"
    echo '  docs/notebooks/quick_start.py: prune a model of your own. `bash run.sh docs` makes the site.'
    ;;
  docs)
    any_python
    environment .venv-docs docs -e '.[docs]'
    rm -rf site jupyter_execute
    JAX_PLATFORMS=cpu .venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --jobs 2 "$@" docs site
    echo "run.sh: the site is site/index.html"
    ;;
  lint)
    any_python
    tests_environment lint games,lint,test # pyright follows imports into what tests install
    status=0
    .venv/bin/ruff check --output-format concise || status=1
    .venv/bin/ruff format --check --output-format concise || status=1
    .venv/bin/pyright --pythonpath .venv/bin/python || status=1
    .venv/bin/lint-imports --no-logo || status=1
    exit $status
    ;;
  lowest)
    find_python 'version == (3, 11)' "Python 3.11"
    environment .venv-lowest test -r ci/lowest.txt -e '.[test]'
    # Old releases warn that they use one another's old names. Benchmarks, examples and documents, docstrings among them,
    # are for what is new.
    exec .venv-lowest/bin/python -m pytest "${parallel[@]}" -W ignore::DeprecationWarning -m 'not slow' \
      -o testpaths=tests --ignore tests/benchmarks --ignore tests/docs --ignore tests/examples "$@"
    ;;
  package)
    any_python
    environment .venv-package package build==1.6.1 twine==7.0.0
    exec .venv-package/bin/python ci/try_package.py "$@"
    ;;
  integrations)
    find_python 'version >= (3, 12)' "Python 3.12 or newer" # MaxText and Levanter want it
    chosen=" $* " status=0 table=$'| script | result | time | versions |\n|---|---|---|---|\n'
    for name in "$@"; do
      [[ " tunix maxtext levanter keras-hub brax dopamine kauldron " == *" $name "* ]] || fail "unknown integration '$name'"
    done
    if wanted tunix; then
      environment .venv-tunix tunix -e . google-tunix==0.1.7
      integrate tunix tunix_finetune google-tunix flax optax
      integrate tunix qwix_quantised qwix flax optax # comes with Tunix
    fi
    # The wheel names no requirements.
    if wanted maxtext; then
      environment .venv-maxtext requirements -e . -r ci/maxtext.txt
      environment .venv-maxtext maxtext --no-deps maxtext==0.2.5
      integrate maxtext maxtext_train maxtext flax optax
    fi
    # pip takes a package that has only releases for developers if it is named.
    if wanted levanter; then
      environment .venv-levanter levanter -e . marin-levanter==0.2.227.dev40316220070 marin-finelog==0.2.71.dev40003900277
      integrate levanter levanter_train marin-levanter equinox optax
    fi
    # Keras Hub asks for tensorflow-text, which its models on JAX do without.
    if wanted keras-hub; then
      environment .venv-keras-hub requirements -e . -r ci/keras_hub.txt
      environment .venv-keras-hub keras-hub --no-deps keras-hub==0.32.0
      integrate keras-hub keras_hub_lm keras-hub keras optax
    fi
    # Brax calls jax.device_put_replicated, which JAX 0.10 has no more.
    if wanted brax; then
      environment .venv-brax brax -e . brax==0.14.2 'jax<0.10'
      integrate brax brax_ppo brax flax optax
    fi
    # Dopamine wants a tensorflow-probability that new JAX breaks; the nightly, in the same folder, has to come after it.
    if wanted dopamine; then
      environment .venv-dopamine dopamine -e . dopamine-rl==4.1.2 tensorboard
      environment .venv-dopamine nightly --no-deps --force-reinstall tfp-nightly==0.26.0.dev20261027
      integrate dopamine dopamine_dqn dopamine-rl flax optax
    fi
    # Kauldron's launcher wants packages for which pip finds no fitting versions in minutes; training needs none of them.
    if wanted kauldron; then
      environment .venv-kauldron requirements -e . -r ci/kauldron.txt
      environment .venv-kauldron kauldron --no-deps kauldron==1.4.4
      integrate kauldron kauldron_trainer kauldron flax optax
    fi
    printf '%s' "$table"
    exit $status
    ;;
  help | -h | --help) usage ;;
  *)
    usage >&2
    fail "unknown command '$command'"
    ;;
esac
