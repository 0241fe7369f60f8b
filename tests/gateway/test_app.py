"""The gateway's statuses, without a network; `test_serve.py` has one."""

import asyncio
import json

import httpx
import pytest


def run(test):
    asyncio.run(asyncio.wait_for(test, 60))


def test_a_call_is_answered(house):
    async def test():
        here = house()
        answer = await here.ask(min_version=3)
        assert answer.status_code == 200
        assert answer.json() == {
            "token_ids": [6, 7, 8],
            "log_probs": [-0.5, -0.5, -0.5],
            "stop_reason": "completed",
            "min_version": 3,
            "max_version": 3,
            "num_preempted": 0,
            "num_cached_tokens": 2,
        }
        ((id, prompt_ids, sampling),) = here.engine.calls
        assert (id, prompt_ids) == ("a", [5, 6, 7])
        assert sampling == {"max_tokens": 8, "temperature": 1.0, "logprobs": True}  # what was said, and no more

    run(test())


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic sesame-0123456789", "sesame-0123456789"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/generate"), ("GET", "/v1/status")])
def test_without_the_token_nothing_is_read_or_said(house, header, method, path):
    async def test():
        here = house(max_body=10)
        headers = {} if header is None else {"authorization": header}
        content = b"x" * 1000 if method == "POST" else None
        refused = await here.client.request(method, path, headers=headers, content=content)
        assert refused.status_code == 401  # and not 413 or 422
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"] == "token"
        assert not here.engine.calls

    run(test())


def test_a_body_that_says_it_is_too_long_is_not_read(house):
    async def test():
        here = house(max_body=1000)
        read = []

        async def chunks():
            for _ in range(100):
                read.append(1)
                yield b"x" * 100

        headers = {**here.headers, "content-length": "10000"}
        refused = await here.client.post("/v1/generate", content=chunks(), headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (413, "body")
        assert not read

    run(test())


@pytest.mark.parametrize("said", [{}, {"content-length": "5"}, {"content-length": "9" * 5000}, {"content-length": "x"}])
def test_a_body_that_is_too_long_is_read_up_to_the_limit(house, said):
    async def test():
        here = house(max_body=1000)
        read = []

        async def chunks():
            for _ in range(100):
                read.append(1)
                yield b"x" * 100

        refused = await here.client.post("/v1/generate", content=chunks(), headers={**here.headers, **said})
        assert refused.status_code == 413
        assert len(read) <= 12

    run(test())


def test_a_body_of_just_the_limit_is_read(house):
    async def test():
        here = house()
        body = json.dumps(here.body()).encode()
        for limit, status in [(len(body), 200), (len(body) - 1, 413)]:
            here.gateway.settings.max_body = limit
            answer = await here.client.post("/v1/generate", content=body, headers=here.headers)
            assert answer.status_code == status

    run(test())


def test_a_malformed_body_and_another_role(house):
    async def test():
        here = house()
        assert (await here.ask(prompt_ids=[])).status_code == 422
        assert (await here.client.post("/v1/generate", content=b"{", headers=here.headers)).status_code == 422
        refused = await here.ask(role="main")
        assert (refused.status_code, refused.json()["error"]) == (404, "role")
        assert not here.engine.calls

    run(test())


def test_a_closed_gateway_says_when_to_come_again(house):
    async def test():
        here = house()
        here.gate.close()
        refused = await here.ask()
        assert (refused.status_code, refused.json()["error"]) == (503, "closed")
        assert int(refused.headers["retry-after"]) > 0
        here.gate.open(3)
        refused = await here.ask(min_version=4)
        assert (refused.status_code, refused.json()["error"]) == (503, "version")
        assert int(refused.headers["retry-after"]) > 0
        assert not here.engine.calls
        assert (await here.ask(min_version=3)).status_code == 200  # a call that was turned away is not remembered

    run(test())


def test_calls_that_are_in_go_on_when_it_closes(house):
    async def test():
        here = house()
        here.engine.hold()
        asked = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        here.gate.close()
        assert (await here.ask(id="b")).status_code == 503
        here.engine.let_go()
        assert (await asked).status_code == 200

    run(test())


def test_status_and_health(house):
    async def test():
        here = house()
        status = await here.client.get("/v1/status", headers=here.headers)
        assert status.json() == {"role": "sub", "version": 3, "open": True}
        here.gate.close()
        status = await here.client.get("/v1/status", headers=here.headers)
        assert status.json() == {"role": "sub", "version": 3, "open": False}
        health = await here.client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "ok"

    run(test())


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/", "/v1", "/metrics"])
def test_there_is_nothing_else(house, path):
    async def test():
        here = house()
        assert (await here.client.get(path)).status_code == 404

    run(test())


def test_a_fault_of_the_gateway_itself_is_told_by_its_type_alone(house, caplog):
    async def test():
        here = house()

        async def broken(asked, hung_up):
            raise RuntimeError(f"cannot handle {asked.prompt_ids}")

        here.answers.answer = broken
        answer = await here.ask(prompt_ids=[918273645])
        assert (answer.status_code, answer.json()) == (500, {"error": "gateway", "detail": "RuntimeError"})

    run(test())
    assert "RuntimeError" in caplog.text and "918273645" not in caplog.text


def test_calls_are_counted_by_what_became_of_them(house):
    async def test():
        here = house()
        await here.ask()
        await here.ask()
        await here.ask(id="b", prompt_ids=[])
        here.gate.close()
        await here.ask(id="c")
        assert here.answers.counts == {"answered": 1, "repeated": 1, "refused/422": 1, "refused/503": 1}

    run(test())


def test_two_clients_are_no_concern_of_each_other(house):
    """Ids are of calls; many at once get each its own answer."""

    async def test():
        here = house()
        answers = await asyncio.gather(*(here.ask(id=str(i), prompt_ids=[i + 1]) for i in range(100)))
        assert [a.json()["token_ids"] for a in answers] == [[i + 2] for i in range(100)]
        assert isinstance(answers[0], httpx.Response)

    run(test())
