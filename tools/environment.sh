# Sourced by tools/quickstart and tools/test: makes .venv at the repository's root and installs pinned versions into it.
# Usage: environment EXTRAS, where EXTRAS are those to install, in square brackets, such as "[test,plot]".

environment() {
    local extras=$1 stamp
    stamp=.venv/.installed$(printf '%s' "$extras" | tr -c 'a-z' '-')$(cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
    if [ ! -e "$stamp" ]; then
        if [ ! -x .venv/bin/python ]; then
            echo "making .venv ..." >&2
            find_python -m venv .venv
        fi
        .venv/bin/python -m pip --version >/dev/null
        # Without an NVIDIA driver the CPU build is enough, and gigabytes smaller; not every index has one by that name.
        if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
            echo "installing torch ..." >&2
            local torch
            torch=$(sed -n 's/^torch==//p' constraints.txt)
            if command -v nvidia-smi >/dev/null || ! .venv/bin/pip install -q "torch==$torch+cpu" 2>/dev/null; then
                .venv/bin/pip install -q "torch==$torch"
            fi
        fi
        echo "installing graphdecode$extras ..." >&2
        .venv/bin/pip install -q -c constraints.txt -e ".$extras"
        # Tests compile CUDA C++ by NVRTC, of which torch's CUDA builds bring a version of their own.
        if [[ $extras == *test* ]] && .venv/bin/python -c 'import torch; raise SystemExit(torch.version.cuda is not None)'; then
            .venv/bin/pip install -q --no-deps nvidia-cuda-nvrtc==13.5.37 2>/dev/null ||
                echo "without the package nvidia-cuda-nvrtc the tests of CUDA C++ are skipped" >&2
        fi
        touch "$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" "$@"
            return
        fi
    done
    echo "error: Python >= 3.11 is needed; set PYTHON to one" >&2
    return 2
}
