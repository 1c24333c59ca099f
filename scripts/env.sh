# Sourced by other scripts.

require_value() { # OPTION VALUE...: ends the script if the option has no value
    if [ $# -lt 2 ] || [[ $2 == --* ]]; then
        echo "error: $1 has no value: write $1 VALUE; --help lists the options" >&2
        exit 2
    fi
}

require_number() { # OPTION VALUE LEAST MOST: ends the script if the value is no whole number in this range
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || [ "$((10#$2))" -lt "$3" ] || [ "$((10#$2))" -gt "$4" ]; then
        echo "error: $1 $2: must be a whole number from $3 to $4; give one" >&2
        exit 2
    fi
}

# make_env FILE...: creates .venv and installs the given requirement files; a no-op if the files have not changed since
# the last complete installation
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
