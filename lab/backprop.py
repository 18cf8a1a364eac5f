"""Back-propagation on the shape of a recurrent model, as a yardstick: PyTorch, float32, AdamW, on the same text. Prints
validations as JSON lines, which `egg.py plot` draws beside runs."""

import argparse
import json
import math
import time

import torch
from torch.nn import functional

import egg_config
from cluster.console import Console
from model import parameters
from tools import train as training

WARM_UP = 100              # steps in which the learning rate rises; then it falls linearly, by seconds,
LAST_RATE = 0.05           # to this share
WEIGHT_DECAY = 0.1
MOMENTS = (1, 1.5, 2, 3, 4, 5, 6, 8)         # seconds after which it validates; and ten times, a hundred times ...
AT_ONCE = 1 << 14          # tokens of validation in one forward pass


def train(cfg, minutes, batch, rate):
    """Trains for `minutes`, validation not counted, on `batch` windows a step at random places. rate: the highest
    learning rate."""
    data = training.open_data(cfg, Console(quiet=True))
    device = "cuda" if cfg.DEVICE != "cpu" and torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")               # TF32 on a GPU
    torch.manual_seed(cfg.ISLAND_SEED)
    learned, logits = model(cfg, device)
    text = torch.from_numpy(data.tokens.astype("i4")).to(device)
    held_out = torch.from_numpy(data.validation.windows).to(device).split(AT_ONCE // cfg.SEQ_LEN + 1)
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY)
    offsets = torch.arange(cfg.SEQ_LEN + 1, device=device)

    def loss_of(windows, reduction="mean"):
        targets = windows[:, 1:].flatten().long()
        return functional.cross_entropy(logits(windows[:, :-1]).flatten(0, 1), targets, reduction=reduction)

    def loss_of_a_batch():
        return loss_of(text[torch.randint(len(text) - cfg.SEQ_LEN, (batch, 1), device=device) + offsets])

    def validate(step, seconds):
        with torch.no_grad():
            value = data.validation.bits(sum(loss_of(windows, "sum").item() for windows in held_out))
        print(json.dumps({"event": "validation", "step": step, "tokens": step * batch * cfg.SEQ_LEN,
                          "seconds": round(seconds, 2), "value": round(value, 6), "unit": data.validation.unit}),
              flush=True)

    loss_of_a_batch().backward()                             # what is prepared at the first call is no time of training
    validate(0, 0.0)
    step, seconds, until = 0, 0.0, 60 * minutes
    while seconds < until:
        power = 10 ** math.floor(math.log10(max(seconds, 1)))
        moment = min([until, 10 * power, *(m * power for m in MOMENTS if m * power > seconds)])
        started = time.perf_counter() - seconds
        while seconds < moment:
            optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARM_UP, 1) * max(LAST_RATE, 1 - seconds / until)
            optimizer.zero_grad()
            loss = loss_of_a_batch()
            loss.backward()
            optimizer.step()
            step += 1
            seconds = time.perf_counter() - started
        loss.item()                                          # waits for a GPU
        seconds = time.perf_counter() - started
        validate(step, seconds)


def model(cfg, device):
    """(learned float32 arrays, a function from tokens int64 [windows, tokens] to logits float32 [windows, tokens,
    VOCAB_SIZE]). The arrays are those of model.parameters, a matrix is [inputs, outputs]. A torch.nn.GRU is in place of
    the gates: it has three instead of two."""
    width = cfg.HIDDEN_DIM
    grus = []
    weights = {}
    start = {p.name: p.start for p in parameters.table(cfg)}
    for t in parameters.tensors(cfg):
        if t.name == "w_f":
            grus.append(torch.nn.GRU(width, width, batch_first=True).to(device))
        elif t.name[:2] not in ("u_", "b_") and t.name != "w_h":
            values = torch.randn(t.rows, t.cols) * t.rows ** -0.5 if t.matrix else \
                torch.full((t.cols,), start[t.name] / 16)
            weights[t.name, t.layer] = values.to(device).requires_grad_()

    def norm(h, name, layer=0):
        return functional.rms_norm(h, (width,), weights[name, layer])

    def logits(x):
        h = functional.embedding(x, weights["embedding", 0].t())
        for layer, gru in enumerate(grus):
            h = h + gru(norm(h, "ln_1", layer))[0]
            h = h + functional.gelu(norm(h, "ln_2", layer) @ weights["w_up", layer]) @ weights["w_down", layer]
        return norm(h, "ln_f") @ weights["head", 0]

    return [*weights.values(), *(p for gru in grus for p in gru.parameters())], logits


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--preset", help="as of egg.py")
    options.add_argument("-D", action="append", default=[], dest="defines", metavar="NAME=VALUE", help="as of egg.py")
    options.add_argument("--minutes", type=float, default=1)
    options.add_argument("--batch", type=int, default=32, help="windows of SEQ_LEN tokens in a step (default: 32)")
    options.add_argument("--rate", type=float, default=0.006, help="the highest learning rate (default: 0.006)")
    args = options.parse_args()
    configuration = egg_config.load(args.preset, args.defines)
    if configuration.MODEL != "gru":
        options.error("a recurrent model is needed: give --preset laptop, laptop-bytes or best-bytes")
    train(configuration, args.minutes, args.batch, args.rate)
