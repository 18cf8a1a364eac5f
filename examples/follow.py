"""Copies the figures of a run to TensorBoard, wandb or MLflow, also while it goes on: follows its events.jsonl.
`python examples/follow.py tensorboard ckpt/events.jsonl` writes to the directory tensorboard; wandb and mlflow write
where their own variables say (WANDB_MODE, MLFLOW_TRACKING_URI). It ends with the run, or with Ctrl-C."""
import json
import os
import sys
import time


def events(path):
    """Those in the log, then the new ones, until the last one in it is the end of the run."""
    file, line, ended = open(path, errors="replace"), "", False
    while True:
        line += file.readline()
        if line.endswith("\n"):
            try:
                event = json.loads(line)
                ended = event["event"] in ("stop", "error")
            except (ValueError, LookupError, TypeError):
                event = None                           # a torn line
            if event:
                yield event
            line = ""
        elif ended:
            return
        elif os.path.exists(path) and not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            file, line = open(path, errors="replace"), ""                # a long log begins anew (docs/EVENTS.md)
        else:
            time.sleep(1)


def figures(event):
    """{name: number}: what an event has to be drawn."""
    kind, unit = event["event"], event.get("unit", "").replace("/", "_per_")
    if kind == "step":
        values = {name: event[name] for name in ("updates", "tokens_per_second", "learning_rate")}
        return values if event["loss"] is None else {f"loss/{unit}": event["loss"], **values}
    if kind in ("validation", "reward"):
        numbers = {f"reward_{name}": number for name, number in event.get("numbers", {}).items()}
        return {f"{kind}/{unit}".rstrip("/"): event["value"], **numbers}         # a reward has no unit
    return {}


def main(library, path):
    if library == "tensorboard":
        import tensorboardX
        writer = tensorboardX.SummaryWriter("tensorboard")
    elif library == "wandb":
        import wandb
        run = wandb.init()
        run.define_metric("*", step_metric="step")     # else what comes late would be dropped
    else:
        import mlflow
        mlflow.start_run()
    for event in events(path):
        values = figures(event)
        if library == "tensorboard":
            for name, value in values.items():
                writer.add_scalar(name, value, event["step"], event["time"])
            if event["event"] == "sample":             # indented: TensorBoard renders it as a code block of Markdown
                text = f"    {event['prompt']} >>> {event['text']}".replace("\n", "\n    ")
                writer.add_text("sample", text, event["step"], event["time"])
        elif values and library == "wandb":
            run.log({**values, "step": event["step"]})
        elif values:
            mlflow.log_metrics(values, step=event["step"])
    if library == "tensorboard":
        writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("tensorboard", "wandb", "mlflow"):
        print("usage: python examples/follow.py tensorboard|wandb|mlflow EVENTS.JSONL", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
    except (LookupError, TypeError):
        sys.exit(f"{sys.argv[2]}: not a log of events: name the events.jsonl of a run")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}: name the events.jsonl of a run")
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is missing: pip install -r requirements/track.txt")
