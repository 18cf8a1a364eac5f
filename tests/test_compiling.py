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
    "units": dict(GRU, PERTURB="units", HIDDEN_DIM=96, SEQ_LEN=100, MLP_RELU=1, SOFT_TARGETS=((0, 3),)),
    "units of a transformer": dict(PERTURB="units", HIDDEN_DIM=96, HEAD_DIM=32, N_LAYERS=2, SEQ_LEN=72, CHUNK_SIZE=8,
                                   ADAPTIVE_NOISE_MODE=0, LOSS="exact", VOTE_LEVELS=7, LOCAL_STEPS=2),
}
STEP, REPORT = ("load", "step"), ("validate", "write", "digest")
ALL = [(model, cc, verbs, "") for model in MODELS for cc in CARDS for verbs in (STEP, REPORT)]
# a card for each way through the code: large tiles, small ones, wgmma; without kernels that another case compiles to
# the same instructions; the deep run has all of them
CASES = [("transformer", (8, 6), STEP, ""), ("transformer", (9, 0), STEP, "full_width|up|head"),
         ("transformer", (9, 0), REPORT, ""), ("gru", (8, 0), REPORT, ""), ("wide gru", (8, 6), REPORT, "recur"),
         ("transforms and Muon", (8, 6), REPORT, "embed"), ("transforms and Muon", (8, 0), STEP, "muon|embed"),
         ("gru", (8, 0), STEP, r"norm|product\b|recur|head"),
         ("units", (8, 6), STEP, "(?!embed|residual|product|scaled)"), ("units", (9, 0), STEP, "products|scaled"),
         ("units of a transformer", (8, 6), STEP,
          "(?!pack$|product|spread|bias|vote_|descend|try_inner|as_rows|add_losses|loudest$|optimize)")]
# arithmetic as IEEE 754 has it, of kernels whose floats must be those of every other machine
ROUNDED = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "div", "sqrt")}
UPDATE = "optimize|muon|moves"                    # with fused operations where the rule has them
CREDITS = "descend|try_|as_rows|through_|loudest_read|spread|token_votes|bias_votes"


@mark.parametrize("model, cc, verbs, names", [*CASES, *(param(*case, marks=mark.deep) for case in ALL)])
def test_kernels_compile(model, cc, verbs, names):
    """names: a pattern for those that are compiled."""
    kernels = [kernel for kernel in kernels_of(make(**MODELS[model]), cc, verbs) if re.match(names, kernel.name)]
    assert kernels
    for kernel in kernels:
        ptx = ptx_of(kernel, cc)
        assert not re.search(r"\.local\b", ptx), f"{kernel.name} uses local memory"
        assert kernel.shared <= CARDS[cc] * 1024, kernel.name
        if re.match(f"{UPDATE}|{CREDITS}", kernel.name):
            found = {*re.findall(r"\b(?:mul|add|sub|fma|div|sqrt|mad|rsqrt|rcp)\.[a-z.]*f32", ptx)}
            assert found <= ROUNDED | ({"fma.rn.f32"} if re.match(UPDATE, kernel.name) else set()), kernel.name
