"Serves an application in a thread, on a port that is free."

import contextlib
import threading
import time

import uvicorn


@contextlib.contextmanager
def serve_in_thread(app):
    """Serve on this machine as long as the block lasts."""
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()
