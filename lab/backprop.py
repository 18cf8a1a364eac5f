"""Back-propagation as a yardstick: PyTorch trains the shapes of egg's models on the same files, for the same seconds.

    python -m lab.backprop transformer --seconds 15 --rates 0.002 0.004 --compile     # the shape of `best`
    python -m lab.backprop gru --bytes --width 64 --layers 1 --batch 32               # that of `laptop-bytes`

Prints lines `seconds tokens bits/byte` of held-out text. Compiling (a minute at most) and validation are not counted.
"""

import argparse
import functools
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from model.data_files import Decoding

WARM_UP = 0.05             # share of the time in which the rate rises; then it falls to 0, as a cosine does
MOMENTS = [part * power for power in (1, 10, 100, 1000) for part in (1, 1.5, 2, 3, 4, 5, 6, 8)]      # of validation
OPTIONS = dict(width=(256, "HIDDEN_DIM"), layers=(4, "N_LAYERS"), head=(64, "HEAD_DIM"), tokens=(64, "SEQ_LEN"),
               batch=(512, "windows in a step"), seconds=(60.0, "of training"), seed=(0, "of weights and windows"),
               validate=(65536, "VALIDATE_TOKENS"), input=("input.bin", "INPUT_FILE"), val=("val.bin", "VAL_FILE"),
               decoding=("decoding.bin", "DECODING_FILE; '': the files hold bytes"),
               device=("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu"))
linear = functools.partial(nn.Linear, bias=False)


class Layer(nn.Module):
    """Attention with rotary positions or a GRU, then an MLP."""

    def __init__(self, o):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(o.width), nn.RMSNorm(o.width)
        self.gru = nn.GRU(o.width, o.width, batch_first=True) if o.model == "gru" else None
        if not self.gru:
            self.qkv, self.out = linear(o.width, 3 * o.width), linear(o.width, o.width)
        self.up, self.down = linear(o.width, 4 * o.width), linear(4 * o.width, o.width)

    def forward(self, h, turn):
        n = self.norm_1(h)
        if self.gru:
            with torch.autocast(h.device.type, enabled=False):         # which would take float16
                h = h + self.gru(n.float())[0]
        else:
            q, k, v = self.qkv(n).unflatten(-1, (3, -1, 2 * turn.shape[-1])).transpose(1, 3).unbind(2)
            y = functional.scaled_dot_product_attention(turned(q, *turn), turned(k, *turn), v, is_causal=True)
            h = h + self.out(y.transpose(1, 2).flatten(2))
        return h + self.down(functional.gelu(self.up(self.norm_2(h))))


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Model(nn.Module):
    """The mean cross-entropy of windows int64 [n, T + 1]."""

    def __init__(self, o, vocabulary):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, o.width), nn.RMSNorm(o.width)
        self.layers, self.head = nn.ModuleList(Layer(o) for _ in range(o.layers)), linear(o.width, vocabulary)
        if o.model == "transformer":
            self.embedding.weight = self.head.weight
        angles = torch.outer(torch.arange(o.tokens), 10000.0 ** (-torch.arange(0, o.head, 2) / o.head))
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, windows):
        h = self.embedding(windows[:, :-1])
        for layer in self.layers:
            h = layer(h, self.turn)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), windows[:, 1:].flatten())


def train(o, rate, vocabulary, text, held_out, n_bytes):
    """Trains a model with this highest learning rate. held_out: windows, n_bytes: those of their targets."""
    torch.manual_seed(o.seed)
    model, cuda = Model(o, vocabulary).to(o.device), o.device == "cuda"
    compiled = torch.compile(model, mode=o.compile) if o.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1, fused=cuda)
    print(f"# {o.model}, {sum(p.numel() for p in model.parameters()):,} weights, rate {rate:g}", flush=True)

    def step_at(done):
        """The loss, after a step with the learning rate that belongs to a share of the time."""
        windows = text[torch.randint(len(text) - o.tokens, (o.batch, 1), device=o.device)
                       + torch.arange(o.tokens + 1, device=o.device)].long()
        optimizer.param_groups[0]["lr"] = rate * min(1, done / WARM_UP + 0.01) * (1 + math.cos(math.pi * done)) / 2
        with torch.autocast(o.device, torch.bfloat16, enabled=cuda):
            loss = compiled(windows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    begun, step = time.perf_counter(), 0
    for _ in range(3):                                       # compiles, and changes nothing: the rate is 0
        step_at(1).item()
    optimizer.state.clear()
    seconds = max(0.0, time.perf_counter() - begun - 60)
    while True:
        with torch.no_grad(), torch.autocast(o.device, torch.bfloat16, enabled=cuda):
            nats = sum(model(part).item() * part[:, 1:].numel() for part in held_out.split(64))
        print(f"{seconds:.2f} {step * o.batch * o.tokens} {nats / math.log(2) / n_bytes:.4f}", flush=True)
        if seconds >= o.seconds:
            return
        moment, begun = min([m for m in MOMENTS if m > seconds] + [o.seconds]), time.perf_counter() - seconds
        while seconds < moment:
            loss = step_at(min(1, seconds / o.seconds))
            step, seconds = step + 1, time.perf_counter() - begun
            if step % 8 == 0 or seconds >= moment:           # waits for a GPU
                loss.item()
                seconds = time.perf_counter() - begun


def main(o):
    decoding = Decoding.read(o.decoding) if o.decoding else None
    text, held_out = (np.fromfile(path, "<u4" if decoding else "u1") for path in (o.input, o.val))
    lengths = decoding.lengths if decoding and not o.bytes else np.ones(256, np.int64)
    if o.bytes and decoding:
        text, held_out = decoding.expand(text), decoding.expand(held_out)
    windows = np.lib.stride_tricks.sliding_window_view(held_out, o.tokens + 1)[::o.tokens]
    wanted = min(len(windows), o.validate // o.tokens or len(windows))
    windows = windows[np.arange(wanted) * len(windows) // wanted].astype(np.int64)
    text, held_out = (torch.from_numpy(x).to(o.device) for x in (text.astype(np.int32), windows))
    torch.set_float32_matmul_precision("high")               # TF32 where a GPU computes in float32
    for rate in o.rates:
        train(o, rate, len(lengths), text, held_out, int(lengths[windows[:, 1:]].sum()))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", choices=["transformer", "gru"])
    options.add_argument("--bytes", action="store_true", help="the model reads the bytes of the tokens")
    options.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="of torch.compile")
    options.add_argument("--rates", type=float, nargs="+", default=[0.003], help="highest learning rates to try")
    for name, (value, text) in OPTIONS.items():
        options.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} (default: {value})")
    main(options.parse_args())
