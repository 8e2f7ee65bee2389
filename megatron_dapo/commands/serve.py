"""``python -m megatron_dapo serve``: SGLang servers without a trainer."""

from __future__ import annotations

import signal
import threading
from argparse import Namespace

from megatron_dapo.config import Options
from megatron_dapo.distributed.launcher import STOP_SIGNALS
from megatron_dapo.servers.engine import make_fleet
from megatron_dapo.types import InputError


def serve(args: Namespace) -> None:
    """Start the servers that the arguments describe and keep them until a signal ends them.

    Raises:
        InputError: a server does not come up, or nothing says what to serve.
    """
    options = Options.from_args(args)
    if options.server.rollout_server_urls:
        raise InputError("serve starts servers: leave out --rollout-server-urls")
    if not args.hf_checkpoint:
        raise InputError("--hf-checkpoint is missing: give the folder of the Hugging Face checkpoint to serve")
    fleet = make_fleet(args, options)
    ended = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ended.set())
    try:
        fleet.start()
        print("serving at " + " ".join(server.url for server in fleet.servers), flush=True)
        ended.wait()
    finally:
        fleet.close()
