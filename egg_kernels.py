"""The forward pass on CUDA: noise, and every kernel of evaluation, validation and single-token generation (SPEC 2 to 7).

What the CUDA engine uses:

    noise = build_noise(cfg)              device functions with the constants frozen, see there
    forward = build_forward(cfg, cc, shared_limit)
        cc              (major, minor) of the device; shared_limit: bytes of dynamic shared memory a block may have
        .packed_bytes   size of the int8 device array that holds the matrices in the order the tensor cores want
        .kernels        [(dispatcher, signature, dynamic shared bytes)]: compile each (egg_ptx.allow_shared) before the first launch
        .tables()       uploads the constant tables; call once on the device, before the launches below
        .scratch_bytes(pairs), .clean_scratch_bytes(windows)    size of the int8 device array `scratch` of a call
        .pack(stream, weights, packed)
                        after every change of the weights. weights: int8, the flat canonical array of egg_model.State
        .evaluate(stream, weights, packed, overlay, windows, job, offset, pairs, scratch, losses)
                        losses[2 i], [2 i + 1] (int64) of pairs job[1] + offset + i, 0 <= i < pairs: even and odd member.
                        overlay: int8, flat as in State; windows: int32 [pairs, T + 1], the tokens of these pairs;
                        job: uint32 [2] on the device = seed of the step, first pair of the job; offset, pairs: Python ints
        .validate(stream, weights, packed, windows, count, scratch, nats)
                        nats[i T + t] (float64): cross-entropy of token t + 1 of window i, without noise; windows: int32 [count, T + 1]
        .cache_bytes(positions), .token_scratch_bytes
        .token(stream, weights, packed, tokens, at, positions, rope, cache, scratch, logits)
                        logits (int32 [V]) after tokens[at[0]] (int32 arrays on the device) at position at[0], without noise; the keys
                        and values of positions 0..at[0] - 1 must be in `cache`, those of at[0] are added. rope: device copy of
                        egg_model.rope_table(cfg, positions), int32, flat

Launches only enqueue work on `stream`, allocate nothing and can be captured in a graph. All arrays are 1-D contiguous device arrays.
"""

import math
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, uint32

import egg_model
import egg_ptx

device = cuda.jit(device=True, inline=True)


# --- noise (SPEC 2, 4) ---------------------------------------------------------------------------------------------------------

def build_noise(cfg):
    """Device functions of the noise streams, constants frozen:

    hash32(seed, i) -> uint32                SPEC 2; arguments are taken modulo 2^32
    noise(seed, i) -> int32                  fits int8
    factor(overlay, seed, i) -> float32      SPEC 4; `seed` of the stream that is scaled (mode 2 only looks at it and at i)
    scaled(p, overlay, seed, i) -> int32     trunc(p * factor), p an integer below 2^24 in size
    """
    MASK, GAUSSIAN, MODE = cfg.DEVICE_MASK, cfg.DEVICE_GAUSSIAN, cfg.ADAPTIVE_NOISE_MODE

    @device
    def hash32(seed, i):
        x = uint32(uint32(seed) + uint32(uint32(i) * uint32(0x9E3779B9)))
        x = uint32(x ^ uint32(x >> uint32(16)))
        x = uint32(x * uint32(0x85EBCA6B))
        x = uint32(x ^ uint32(x >> uint32(13)))
        x = uint32(x * uint32(0xC2B2AE35))
        return uint32(x ^ uint32(x >> uint32(16)))

    @device
    def draw(r, sign_bit):
        size = int32(uint32(r >> uint32(sign_bit + 1)) & uint32(MASK))
        return size if uint32(r >> uint32(sign_bit)) & uint32(1) else int32(-size)

    @device
    def noise(seed, i):
        r = hash32(seed, i)
        if GAUSSIAN:
            return int32(int32(draw(r, 0) + draw(r, 5)) + draw(r, 10))
        return draw(r, 0)

    @device
    def factor(overlay, seed, i):
        if MODE == 0:
            return float32(1)
        if MODE == 1:
            return float32(float32(min(max(int32(overlay), int32(0)), int32(64))) * float32(1 / 64))
        u = float32(float32(float32(hash32(uint32(uint32(seed) + uint32(100000)), i)) + float32(1)) / float32(4294967296))
        scale = float32(float32(int32(int32(overlay) + int32(127))) / float32(255))
        return float32(scale / float32(math.sqrt(u)))

    @device
    def scaled(p, overlay, seed, i):
        if MODE == 0:
            return int32(p)
        if MODE == 1:
            size = int32(int32(abs(int32(p)) * min(max(int32(overlay), int32(0)), int32(64))) >> int32(6))
            return size if p >= 0 else int32(-size)
        return egg_ptx.trunc_f32(float32(float32(int32(p)) * factor(overlay, seed, i)))

    return SimpleNamespace(hash32=hash32, noise=noise, factor=factor, scaled=scaled)
