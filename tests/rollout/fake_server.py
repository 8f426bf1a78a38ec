"""A small HTTP server in the place of vLLM's."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

STOP = 1
GENERATE = "/inference/v1/generate"


class FakeServer(ThreadingHTTPServer):
    """Answers every path with 200 and {}; `answers` maps a path to a function of the request."""

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), FakeHandler)
        self.answers = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.closing = threading.Event()


class FakeHandler(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        function = self.server.answers.get(self.path, lambda request: (200, b"{}"))
        status, answer = function(json.loads(body) if body else None)
        if status is None:
            return
        self.send_response(status)
        self.end_headers()
        # The client leaves at the first of several bad answers.
        with suppress(BrokenPipeError):
            self.wfile.write(answer)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass


@contextmanager
def serve(server):
    """Let the server answer in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


def build_choice(index=0, token_ids=(4, 9, STOP), finish_reason="stop", version="default"):
    return {
        "index": index,
        "token_ids": list(token_ids),
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in token_ids]},
        "finish_reason": finish_reason,
        "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
    }


def answer_well(request):
    choices = [build_choice(i) for i in range(request["sampling_params"]["n"])]
    return 200, json.dumps({"choices": choices}).encode()


def build_update(policy_version, send=lambda connect_info, store: None):
    """An update of weights that sends nothing, or calls send."""
    return SimpleNamespace(
        policy_version=policy_version,
        is_probe=False,
        base_version=None,
        hashes=[],
        format_schedules=lambda: ["[]"],
        send=send,
    )
