"""Back-propagation on the shape of a configuration, as a yardstick: PyTorch, float32, AdamW. It reads the same text and
measures the same bits per byte as a run, and its log is drawn beside those of runs. PyTorch is no dependency of egg."""

import contextlib
import math
import time

import numpy as np

import egg_config
from cluster import event_log
from egg_config import EggError
from model import parameters
from tools import train as training

try:
    import torch
except ImportError:
    raise EggError("PyTorch is missing: pip install torch") from None

functional = torch.nn.functional

WARM_UP = 100              # steps in which the learning rate rises; then it falls linearly, by seconds,
LAST_RATE = 0.05           # to this share
WEIGHT_DECAY = 0.1
MOMENTS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)     # seconds after which it validates; and ten times, a hundred times ...
AT_ONCE = 1 << 14          # tokens of validation in one forward pass
PROMPTS, GROUP = 16, 16    # of a step with rewards, and the texts after each


def train(cfg, minutes, batch, rate, threads, console, log_json=None, objective=None):
    """Trains for `minutes`, validation not counted, on `batch` windows a step at random places. rate: the highest
    learning rate; threads: cores of a CPU, default all. Prints every validation and appends it to the file log_json.
    objective: (file, minutes, learning rate) of a second part, with rewards, or None. Raises EggError."""
    gpu = cfg.DEVICE != "cpu" and torch.cuda.is_available()
    if cfg.DEVICE == "cuda" and not gpu:
        raise EggError("DEVICE = cuda, but PyTorch finds no GPU here: set DEVICE=cpu")
    data = training.open_data(cfg, console)
    if data.validation is None:
        raise EggError(f"nothing to measure: {cfg.VAL_FILE} (VAL_FILE) must exist and VALIDATE_EVERY not be 0")
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.set_float32_matmul_precision("high")       # TF32 on a GPU
    torch.manual_seed(cfg.ISLAND_SEED)
    model = _model(cfg, "cuda" if gpu else "cpu")
    before = 0.0
    _, unit = egg_config.loss_unit(cfg.constants())
    with contextlib.ExitStack() as stack:
        log = log_json and stack.enter_context(contextlib.closing(
            event_log.JsonLog(log_json, "give --log-json a file that can be written", console.line, True)))

        def emit(kind, **fields):
            if log:
                log.emit({"time": round(time.time(), 3), "event": kind, **fields}, None)

        emit("start", step=0, directory=None, config=cfg.constants())
        training.print_references(cfg, data, console, emit)
        for step, seconds, loss, value in _run(cfg, data, *model, 60 * minutes, batch, rate):
            tokens = step * batch * cfg.SEQ_LEN
            if step:
                emit("step", step=step - 1, tokens=tokens, loss=loss, unit=unit, seconds=round(seconds - before, 6),
                     elapsed=round(seconds, 3))
            emit("validation", step=step, tokens=tokens, value=round(value, 6), unit=data.validation.unit)
            console.line(f"{seconds:8.1f} s  step {step:7,}  {value:.3f} {data.validation.unit}")
            before = seconds
        if objective:
            path, minutes, rate = objective
            objective = stack.enter_context(training.opened_objective(cfg, path, data))
            parts = _run(cfg, data, *model, 60 * minutes, batch, rate, objective)
            for step, seconds, _, (value, texts, mean) in parts:
                emit("reward", step=step, value=mean, texts=texts)
                console.line(f"{seconds:8.1f} s  step {step:7,}  {value:.3f} {data.validation.unit}  reward {mean:.4f}")


def _run(cfg, data, learned, logits, until, batch, rate, objective=None):
    """Yields (step, seconds of training, mean training loss since the last one in bits/token, validation). objective:
    an Objective; then a validation is (value, number of held-out prompts, mean reward)."""
    device = learned[0].device
    text = torch.from_numpy(data.tokens.astype("i4")).to(device)
    held_out = torch.from_numpy(data.validation.windows).to(device).split(AT_ONCE // cfg.SEQ_LEN + 1)
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY)
    offsets = torch.arange(cfg.SEQ_LEN + 1, device=device)

    def loss_of(windows, reduction="mean"):
        found, targets = logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten().long()
        return functional.cross_entropy(found, targets, reduction=reduction)

    def loss_of_a_batch():
        return loss_of(text[torch.randint(len(text) - cfg.SEQ_LEN, (batch, 1), device=device) + offsets])

    def loss_with_rewards():
        """REINFORCE with the mean of a group as its baseline, the core of GRPO, and a share of text."""
        prompts = objective.prompts(torch.randint(1 << 31, (PROMPTS,)).repeat_interleave(GROUP).numpy())
        writer.written.clear()
        of_file = objective.settings
        temp = float(of_file.temp) or 1.0                   # at 0 all texts of a group would be equal
        objective.settings = of_file._replace(temp=temp)
        rewards = torch.tensor(objective.judged(writer, prompts)[1]).view(PROMPTS, GROUP)
        objective.settings = of_file
        better = (rewards - rewards.mean(1, keepdim=True)).flatten() / (rewards.std() + 1e-6)
        total, count = 0.0, 0
        for texts, judged in writer.written:                # one for every turn
            scores = (logits(texts[:, :-1]) / temp).log_softmax(-1).gather(-1, texts[:, 1:, None])[..., 0]
            total = total - (scores * better.to(device)[:, None])[judged[:, 1:]].sum()
            count += int(judged.sum())
        return (1 - cfg.TEXT_SHARE) * total / max(1, count) + cfg.TEXT_SHARE * loss_of_a_batch()

    def validation():
        with torch.no_grad():
            value = data.validation.bits(sum(loss_of(windows, "sum").item() for windows in held_out))
        return (value, *objective.measured(writer)) if objective else value

    writer = Writer(logits, objective, device)
    loss_of_a_step = loss_with_rewards if objective else loss_of_a_batch

    loss_of_a_step().backward()                            # what is prepared at the first call is no time of training
    yield 0, 0.0, None, validation()
    step, seconds = 0, 0.0
    while seconds < until:
        power = 10 ** math.floor(math.log10(max(seconds, 1)))
        moment = min([until, *(m * power for m in MOMENTS if m * power > seconds)])
        first, total = step, 0.0
        started, now = time.perf_counter(), seconds
        while now < moment:
            optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARM_UP, 1) * max(LAST_RATE, 1 - now / until)
            optimizer.zero_grad()
            loss = loss_of_a_step()
            loss.backward()
            optimizer.step()
            step, total = step + 1, total + loss.detach()
            now = seconds + time.perf_counter() - started
        mean = total.item() / (step - first) / math.log(2)          # waits for a GPU
        seconds += time.perf_counter() - started
        yield step, seconds, mean, validation()


class Writer:
    """Takes the place of the engine that an Objective lets write. written: a list of (texts int64 [sequences, room],
    bool of the same shape, which tokens were written and judged)."""

    def __init__(self, logits, objective, device):
        self._logits, self._objective, self._device = logits, objective, device
        self.written = []

    def write(self, texts, lengths, seeds, s, first_pair=None):
        """As engine.cpu_engine; the draws are those of torch."""
        states, first = {}, int(lengths.min())
        found, begin = torch.from_numpy(texts).long().to(self._device), torch.from_numpy(lengths).to(self._device)
        with torch.no_grad():
            for i in range(first, found.shape[1]):
                z = self._logits(found[:, :i] if i == first else found[:, i - 1:i], states)[:, -1]
                drawn = torch.multinomial((z / float(s.temp)).softmax(-1), 1)[:, 0] if s.temp else z.argmax(-1)
                found[:, i] = torch.where(begin <= i, drawn, found[:, i])
        texts[:] = found.cpu().numpy()
        judged = np.arange(texts.shape[1]) >= lengths[:, None]
        for row, text, n in zip(judged, texts, lengths):
            row[n + self._judged_tokens(text[n:n + self._objective.write]):] = False
        self.written.append((found, torch.from_numpy(judged).to(self._device)))

    def _judged_tokens(self, tokens):
        """int: how many of the tokens that were written are judged: up to the first STOP, and this too."""
        decoding, stop = self._objective.decoding, self._objective.stop
        before, found, _ = decoding.expand(tokens).tobytes().decode("utf-8", "replace").partition(stop or "\0")
        return len(decoding.encode((before + found).encode())) if stop and found else len(tokens)


def _model(cfg, device):
    """(learned float32 arrays, a function from tokens int64 [windows, tokens] to logits float32 [windows, tokens,
    VOCAB_SIZE]; a dict as its second argument keeps the states of the recurrent model for the next call). The arrays
    are those of model.parameters, a matrix is [inputs, outputs]. A torch.nn.GRU is in place of the gates of the
    recurrent model: it has three instead of two."""
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
        return functional.rms_norm(h, (width,), weights[name, layer]) + weights.get((name + "_bias", layer), 0.0)

    def mlp(h, ln, up, bias_up, down, bias_down, layer=0):
        u = norm(h, ln, layer) @ weights[up, layer] + weights.get((bias_up, layer), 0.0)
        return h + functional.gelu(u) @ weights[down, layer] + weights.get((bias_down, layer), 0.0)

    def heads(h, name, layer):
        return (h @ weights[name, layer]).unflatten(-1, (cfg.N_HEADS, cfg.HEAD_DIM)).transpose(1, 2)

    def rotated(h):
        frequency = 10000.0 ** (-torch.arange(0, cfg.HEAD_DIM, 2, device=h.device) / cfg.HEAD_DIM)
        angle = torch.arange(h.shape[2], device=h.device)[:, None] * frequency
        pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def logits(x, states=None):
        states = {} if states is None else states
        h = functional.embedding(x, weights["embedding", 0].t())
        if not grus:
            h = h + weights["emb_bias", 0]
            h = mlp(h, "ln_init", "w_emb_mlp_up", "mlp_emb_bias_up", "w_emb_mlp_down", "mlp_emb_bias_down")
        for layer in range(cfg.N_LAYERS):
            n = norm(h, "ln_1", layer)
            if grus:
                more, states[layer] = grus[layer](n, states.get(layer))
                h = h + more
            else:
                q, k, v = (heads(n, name, layer) for name in ("w_q", "w_k", "w_v"))
                a = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
                h = h + a.transpose(1, 2).flatten(2) @ weights["w_o", layer]
            h = mlp(h, "ln_2", "w_up", "mlp_bias_up", "w_down", "mlp_bias_down", layer)
        return norm(h, "ln_f") @ weights["head" if grus else "embedding", 0]

    return [*weights.values(), *(p for gru in grus for p in gru.parameters())], logits
