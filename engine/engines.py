"""Makes the engine for a device. The engines and what they need are loaded only then."""

from engine.hardware import EngineError


def make(cfg, tokens, device="cpu", threads=None, verbs=()):
    """The engine for `device`: cpu_engine.CpuEngine or cuda_engine.CudaEngine, which have the same verbs. tokens: 1-D
    array, or None if nothing is evaluated. threads: CPU cores, default all. verbs: "digest", "validate" or "write", if
    a GPU shall compile them now, together with those of a step. Raises EngineError."""
    try:
        if device == "cpu":
            from engine import cpu_engine
            return cpu_engine.CpuEngine(cfg, tokens, threads)
        from engine import cuda_engine
        return cuda_engine.CudaEngine(cfg, tokens, int(device.partition(":")[2]), verbs=verbs)
    except ValueError as error:
        raise EngineError(str(error)) from None
