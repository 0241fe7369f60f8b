"""A server of chat completions in a thread of its own, for commands that have their own event loop."""

import asyncio
import threading

import pytest
from aiohttp import web

from verl_drmas.serving import client, look


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(look, "CHECK_SECONDS", 30.0)  # a busy machine is no dead server


class Served:
    """Answers with `reply(body)`: a text, or a whole answer, at once or awaited; counts what it was asked."""

    def __init__(self, reply):
        self.reply, self.models, self.roots = reply, ["tiny"], {}
        self.usage = (11, 3)
        self.asked = []
        self.url = ""

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        said = self.reply(body)
        if asyncio.iscoroutine(said):
            said = await said
        if not isinstance(said, str):
            return said
        usage = {"prompt_tokens": self.usage[0], "completion_tokens": self.usage[1]} if self.usage else None
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})

    async def list_models(self, request):
        told = [{"id": name, **({"root": self.roots[name]} if name in self.roots else {})} for name in self.models]
        return web.json_response({"data": told})


@pytest.fixture
def serve():
    """Starts servers; `serve(reply)` gives one that answers at its `url` until the test ends or `stop()` is called."""
    running = []

    def start(reply):
        served, ready, loop = Served(reply), threading.Event(), asyncio.new_event_loop()

        def run():
            asyncio.set_event_loop(loop)
            application = web.Application()
            application.router.add_post("/v1/chat/completions", served.complete)
            application.router.add_get("/v1/models", served.list_models)
            site = web.AppRunner(application)
            loop.run_until_complete(site.setup())
            place = web.TCPSite(site, "127.0.0.1", 0)
            loop.run_until_complete(place.start())
            served.url = f"http://127.0.0.1:{site.addresses[0][1]}/v1"
            ready.set()
            loop.run_forever()
            loop.run_until_complete(site.cleanup())

        thread = threading.Thread(target=run)

        def stop():
            if thread.is_alive():
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

        thread.start()
        assert ready.wait(10)
        served.stop = stop
        running.append(served)
        return served

    yield start
    for served in running:
        served.stop()
