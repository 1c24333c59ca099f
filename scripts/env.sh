# Sourced by other scripts: `make_env FILE...` creates .venv and installs the given requirement files. It does nothing if
# the files have not changed since the last complete installation.

make_env() {
    local python=${PYTHON:-python3} stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $python is not Python 3.11 or newer; set PYTHON, for example PYTHON=python3.12 bash $0" >&2
        return 1
    fi
    stamp=.venv/installed-$(cat constraints.txt "$@" | sha256sum | cut -c1-16)
    [ -e "$stamp" ] && return 0
    if [ ! -x .venv/bin/pip ] && ! "$python" -m venv .venv; then
        echo "error: no virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        return 1
    fi
    echo "installing $* into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "${@/#/--requirement=}"
    touch "$stamp"
}
