# SPDX-License-Identifier: Apache-2.0
# What each command begins with on a machine with a GPU that is lent for minutes and has no network. In the root of the
# repository:
#
#   . tools/gpu_day/begin.sh; build; check --parts smoke tests "step cnn" --budget 300 --out "$OUT/b"; keep_cache
#
# The folder .gpu_day, which git ignores, may have been carried along:
#   wheels/*.whl      what the machine lacks of pybind11, setuptools, pytest, pytest-timeout, hypothesis, ...
#   modules/*.so      singa_lite's, built elsewhere for the machine's Python, for the case that building fails
#   cupy_cache.tgz    kernels that an earlier command compiled, from keep_cache
#   libnccl.so.2.xz   NCCL 2.30 or later, which lets ranks share a GPU, from tools/gpu_day/shrink_nccl.py, for:
#                     with_nccl check --parts ranks
#   commit            what `git rev-parse HEAD` says, as a copy of the tree may have no git
set -u
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
PYTHON=${PYTHON:-python3} OUT=${OUT:-$PWD/build/gpu-check} CARRIED=${CARRIED:-$PWD/.gpu_day} CHECKOUT=$PWD
CACHE=$CHECKOUT/build/gpu-check/cache
export CUPY_CACHE_DIR=$CACHE/cupy_cache_dir
mkdir -p "$OUT" "$CUPY_CACHE_DIR"
[ -f "$CARRIED/cupy_cache.tgz" ] && tar xzf "$CARRIED/cupy_cache.tgz" -C "$CACHE"
[ -f "$CARRIED/commit" ] && export GPU_CHECK_COMMIT=$(cat "$CARRIED/commit")
[ -d "$CARRIED/modules" ] && export GPU_CHECK_MODULES=$CARRIED/modules

# reads CUDA's and PyTorch's libraries, gigabytes, before the first part with a deadline needs them
"$PYTHON" -c '
import glob, importlib.util, os
torch = importlib.util.find_spec("torch")
for root in [os.path.dirname(os.path.dirname(torch.origin))] if torch else []:
    for path in glob.glob(root + "/nvidia/*/lib/*.so*") + glob.glob(root + "/torch/lib/*.so"):
        with open(path, "rb") as file:
            while file.read(1 << 24): pass
' >/dev/null 2>&1 &

# check.py with its arguments
check() { "$PYTHON" -m tools.gpu_check.check "$@"; }

# what has to be there before anything else runs; more parts may follow
build() {
  local wheels=()
  [ -d "$CARRIED/wheels" ] && wheels=(--wheels "$CARRIED/wheels")
  check --parts machine build compile "$@" --budget 240 --out "$OUT/a" ${wheels[@]+"${wheels[@]}"}
}

# Python in the built copy, or in the checkout while there is none: in_tree -m benchmarks.gpu.step resnet50
in_tree() (
  [ -d "$CHECKOUT/build/gpu-check/tree/singa_lite" ] && cd "$CHECKOUT/build/gpu-check/tree"
  PYTHONPATH=$PWD:$CHECKOUT/build/gpu-check/site${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" "$@"
)

# a command with the carried NCCL
with_nccl() {
  "$PYTHON" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$CARRIED/libnccl.so.2.xz" "$CACHE/libnccl.so.2" || return
  SINGA_LITE_NCCL_LIB=$CACHE/libnccl.so.2 "$@"
}

# the compiled kernels, for the next command: put the file into .gpu_day
keep_cache() { tar czf "$OUT/cupy_cache.tgz" -C "$CACHE" cupy_cache_dir; }
