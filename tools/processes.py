"""Processes that a command starts: workers, and judges of rewards."""

import multiprocessing
import multiprocessing.resource_tracker
import signal


def start(main, *arguments):
    """(process, our end of its pipe). The new process calls main(*arguments, the other end); it gets no Ctrl-C, and
    ends with this one."""
    context = multiprocessing.get_context("spawn")                       # a GPU's driver does not survive fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_begin, args=(main, *arguments, theirs), daemon=True)
    multiprocessing.resource_tracker.ensure_running()                    # which would unblock SIGINT later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})   # inherited
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, ours


def _begin(main, *arguments):
    multiprocessing.current_process().daemon = False         # it may have processes of its own: judges, a user's pool
    main(*arguments)
