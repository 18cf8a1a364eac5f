"""Every CUDA kernel compiles for every card, without a GPU: in registers alone, within the shared memory of a block."""

import re

from pytest import mark, param

from egg_config import make
from compiling import CARDS, kernels_of, ptx_of
from readings import TINY

GRU = dict(MODEL="gru", HIDDEN_DIM=64, N_LAYERS=2, SEQ_LEN=12, VOCAB_SIZE=256, CHUNK_SIZE=32, ADAPTIVE_NOISE_MODE=0,
           STATE_TOKENS=5, LOSS="exact")
MODELS = {
    "transformer": {},
    "wide rows": dict(TINY, HIDDEN_DIM=608, SEQ_LEN=72, VOCAB_SIZE=300, ADAPTIVE_NOISE_MODE=2),
    "transforms and Muon": dict(TINY, USE_MUON=1, ADAPTIVE_NOISE_MODE=2, NTT_MODE=3),
    "mma": dict(TENSOR_CORES="mma"),
    "gru": GRU,
    "wide gru": dict(GRU, HIDDEN_DIM=288),
    "activations": dict(GRU, PERTURB="activations", HIDDEN_DIM=128, SEQ_LEN=100, GROUP_SIZE=8, MLP_RELU=1,
                        SOFT_TARGETS=((0, 3),)),
    "activations of a transformer": dict(PERTURB="activations", HIDDEN_DIM=96, HEAD_DIM=32, N_LAYERS=2, SEQ_LEN=72,
                                         GROUP_SIZE=8, CHUNK_SIZE=32, ADAPTIVE_NOISE_MODE=0, LOSS="exact"),
}
STEP, REPORT = ("load", "step"), ("validate", "write", "digest")
ALL = [(model, cc, verbs, "") for model in MODELS for cc in CARDS for verbs in (STEP, REPORT)]
# a card for each way through the code: large tiles, small ones, wgmma; the deep run has all of them
CASES = [("transformer", (8, 6), STEP, ""), ("transformer", (9, 0), STEP, "full_width|up|head"),
         ("transformer", (9, 0), ("validate", "digest"), "embed|norm|full_width|head|digest"),
         ("transformer", (8, 6), ("write",), ""), ("gru", (9, 0), ("write",), ""), ("activations", (9, 0), STEP, ""),
         ("gru", (8, 0), STEP, r"pack|norm|product\b|recur|head"),
         ("activations of a transformer", (8, 6), STEP, "full_width|up|embed|share|attend|add_up|errors"),
         ("transforms and Muon", (8, 0), STEP, "muon|embed|optimize")]
ROUNDED = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "fma", "div", "sqrt")}


@mark.parametrize("model, cc, verbs, names", [*CASES, *(param(*case, marks=mark.deep) for case in ALL)])
def test_kernels_compile(model, cc, verbs, names):
    """names: a pattern for those that are compiled."""
    kernels = [kernel for kernel in kernels_of(make(**MODELS[model]), cc, verbs) if re.match(names, kernel.name)]
    assert kernels
    for kernel in kernels:
        ptx = ptx_of(kernel, cc)
        assert not re.search(r"\.local\b", ptx), f"{kernel.name} uses local memory"
        assert kernel.shared <= CARDS[cc] * 1024, kernel.name
        if kernel.name == "optimize" or kernel.name.startswith("muon"):
            # as IEEE 754 has it: no other fused or approximate arithmetic
            assert {*re.findall(r"\b(?:mul|add|sub|fma|div|sqrt|mad|rsqrt|rcp)\.[a-z.]*f32", ptx)} <= ROUNDED
