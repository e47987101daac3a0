"""Stage 10. The engine behind OpenAI's HTTP API.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /health, /metrics

A request becomes token ids, a `Stream` of the async engine, and an answer: one JSON object, or
chunks as server-sent events. A client that goes away closes its stream, however far it had come,
and that frees its blocks. All that a client can do wrong is an error in OpenAI's shape.

Knows: HTTP, who may ask, which errors are whose fault. Does not know: how tokens are made.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoteach.async_engine import AsyncEngine, EngineStopped, QueueFull, StepFailed, Stream
from nanoteach.engine import Engine
from nanoteach.metrics import Metrics
from nanoteach.protocol import (
    Answer,
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    GenerationRequest,
    error_body,
    printable,
)
from nanoteach.types import TooLong

MAX_BODY_BYTES = 4 * 2**20
RETRY_AFTER = 1  # seconds
# Longer than clients keep idle connections (httpx, and so openai, 5 s): one that is reused in the
# moment in which we close it costs its request.
KEEP_ALIVE = 60
CLIENT_LEFT = 499  # nobody reads it

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class APIError(Exception):
    """An error that a client is told of."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error",
        param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.status = status
        super().__init__(message)
        self.body = error_body(printable(message), kind, printable(param), code)
        self.headers = headers


class BodyLimit:
    """A middleware: a body of over MAX_BODY_BYTES is read to its end, not kept, and refused."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size <= MAX_BODY_BYTES:
                return message
            while message.get("more_body"):
                message = await receive()
            raise HTTPException(413, f"the body has over {MAX_BODY_BYTES:,} bytes")

        await self.app(scope, limited, send)


class EventStream(StreamingResponse):
    """Server-sent events. `close` is called when it is over, whichever side ended it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


def create_app(
    async_engine: AsyncEngine, metrics: Metrics, model_name: str, api_key: str | None = None
) -> FastAPI:
    """The server's application. It runs the async engine while it runs itself.

    model_name: what clients must ask for. api_key: what they must show, if anything.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with async_engine:
            yield

    bearer = HTTPBearer(auto_error=False, description="The server's API key, if it has one.")

    async def authorize(request: Request) -> None:
        shown = await bearer(request)
        given = shown.credentials if shown else ""
        # Headers come as latin-1, whatever their bytes were.
        if api_key and not secrets.compare_digest(given.encode("latin-1"), api_key.encode()):
            raise APIError(
                401, "a wrong API key, or none: send Authorization: Bearer KEY",
                "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    class KeyFirst(APIRoute):
        """A route that asks for the key before it reads a body. Dependencies come after that."""

        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def ask_first(request: Request) -> Response:
                await authorize(request)
                return await handle(request)

            return ask_first

    app = FastAPI(
        title="nanoteach", lifespan=lifespan,
        exception_handlers={
            APIError: told, RequestValidationError: invalid,
            HTTPException: other, Exception: failed,
        },
    )  # fmt: skip
    app.add_middleware(BodyLimit)
    # `bearer` as a dependency puts the key into the API's description, no more.
    v1 = APIRouter(prefix="/v1", route_class=KeyFirst, dependencies=[Depends(bearer)])
    started = int(time.time())
    card = {
        "id": model_name, "object": "model", "created": started, "owned_by": "nanoteach",
        "max_model_len": async_engine.engine.core.max_model_len,
    }  # fmt: skip

    def check_model(name: str) -> None:
        if name != model_name:
            raise APIError(
                404, f"there is no model {name!r}: this server has {model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [card]}

    @v1.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """What is known of a model."""
        check_model(name)
        return card

    @v1.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, or with several."""
        check_model(body.model)
        with api_errors("prompt"):
            stream = await async_engine.open(body.prompts, body.params)
            answer = CompletionAnswer(model_name, stream.request_ids, bool(body.return_token_ids))
            return await respond(request, stream, partial(async_engine.close, stream), answer, body)

    @v1.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Go on with a conversation."""
        check_model(body.model)
        with api_errors("messages"):
            messages = [message.plain for message in body.messages]
            template = async_engine.engine.apply_chat_template
            prompt = await asyncio.to_thread(template, messages)
            stream = await async_engine.open([prompt], body.params)
            answer = ChatAnswer(
                model_name, stream.request_ids, bool(body.return_token_ids), body.top_logprobs or 0
            )
            return await respond(request, stream, partial(async_engine.close, stream), answer, body)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 otherwise."""
        return Response(status_code=200 if async_engine.healthy else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counts and times, for Prometheus."""
        with api_errors(""):  # it has no prompt
            text = metrics.render(await async_engine.call(Engine.stats))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(v1)
    return app


# --- one request -------------------------------------------------------------------------------


@contextlib.contextmanager
def api_errors(prompt_field: str) -> Iterator[None]:
    """The engine's errors as HTTP has them. prompt_field: where a request has its prompt."""
    try:
        yield
    except TooLong as error:
        code = "context_length_exceeded"  # as OpenAI has it: clients shorten their history
        raise APIError(400, str(error), param=prompt_field, code=code) from error
    except ValueError as error:  # it can't be served, and the error says why
        raise APIError(400, str(error)) from error
    except QueueFull as error:
        raise APIError(
            429, str(error), "rate_limit_error", code="queue_full",
            headers={"Retry-After": str(RETRY_AFTER)},
        ) from error  # fmt: skip
    except EngineStopped as error:
        raise APIError(503, str(error), "server_error", code="shutting_down") from error
    except StepFailed as error:
        raise APIError(500, str(error), "server_error") from error


async def respond(
    request: Request, stream: Stream, close: Callable[[], None], answer: Answer,
    body: GenerationRequest,
) -> Response:  # fmt: skip
    """The answer, whole or in chunks; then, or when the client is gone, the stream is closed."""
    if body.stream:
        options = body.stream_options
        return EventStream(events(stream, answer, bool(options and options.include_usage)), close)
    work = asyncio.create_task(collect(stream, answer))
    left = asyncio.create_task(until_left(request))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(work.result()) if work.done() else Response(status_code=CLIENT_LEFT)
    finally:
        close()
        work.cancel()
        left.cancel()


async def collect(stream: Stream, answer: Answer) -> dict[str, Any]:
    """All of an answer."""
    async for outputs in stream:
        answer.outputs.update((output.request_id, output) for output in outputs)
    return answer.whole()


async def until_left(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(stream: Stream, answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """An answer's chunks as events. What goes wrong now can only be told in one of them."""
    # OpenAI's chunks have a usage where it was asked for, and it is null in all but the last.
    none_yet = {"usage": None} if include_usage else {}
    try:
        for chunk in answer.opening():
            yield event(chunk | none_yet)
        async for outputs in stream:
            # One piece of text for all that came at once.
            yield "".join(event(answer.chunk(output) | none_yet) for output in outputs)
        if include_usage:
            yield event(answer.usage_chunk())
    except (StepFailed, EngineStopped) as error:
        yield event(error_body(str(error), "server_error"))
    yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


# --- errors ------------------------------------------------------------------------------------


async def told(request: Request, error: Exception) -> Response:
    """An error that we raised."""
    assert isinstance(error, APIError)
    return JSONResponse(error.body, error.status, error.headers)


async def invalid(request: Request, error: Exception) -> Response:
    """A body that is not as it should be."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    kind, told = problem["type"], problem.get("ctx", {})
    place = [str(part) for part in problem["loc"] if part != "body"]
    what, code = problem["msg"].removeprefix("Value error, "), None
    if kind == "json_invalid":
        what, place = f"the body is no JSON: {told['error']}", []
    elif "param" in told:  # from protocol.py; it names its field
        place, code = [*place, told["param"]], kind
    elif kind == "too_long":
        what = f"{'.'.join(place)}: this takes up to {told['max_length']:,}: send fewer"
    elif place:
        what = f"{'.'.join(place)}: {what}"
    elif kind in ("missing", "model_attributes_type"):
        what = "the body is no JSON object: send one, with Content-Type: application/json"
    return JSONResponse(error_body(printable(what), param=".".join(place) or None, code=code), 400)


async def other(request: Request, error: Exception) -> Response:
    """No such page, no such method, a body too long or unreadable."""
    assert isinstance(error, HTTPException)
    what = str(error.detail)
    if error.status_code == 404:
        what = f"there is no {printable(request.url.path)} here: the API is at /v1 (see /docs)"
    return JSONResponse(error_body(what), error.status_code, error.headers)


async def failed(request: Request, error: Exception) -> Response:
    """A fault of ours. The log has it; the client is not told more."""
    return JSONResponse(error_body("the server failed; its log says how", "server_error"), 500)


# --- running it --------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn, which waits for open connections at its end; meanwhile the engine drains.

    shutdown_timeout: seconds that running requests have then.
    """

    def __init__(
        self, app: FastAPI, async_engine: AsyncEngine, host: str, port: int, shutdown_timeout: float
    ) -> None:
        self.async_engine, self.shutdown_timeout = async_engine, shutdown_timeout
        super().__init__(
            uvicorn.Config(
                app,
                host,
                port,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=round(shutdown_timeout) + 5,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins `shutdown`. Ctrl-C after it ends what still runs."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:
            asyncio.run_coroutine_threadsafe(self.async_engine.drain(0), self.async_engine.loop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs, or end it in time; its clients are told."""
        drain = asyncio.create_task(self.async_engine.drain(self.shutdown_timeout))
        await super().shutdown(sockets)
        await drain


def make_server(
    engine: Engine, model_name: str, host: str = "127.0.0.1", port: int = 8000, *,
    api_key: str | None = None, max_queue: int = 512, shutdown_timeout: float = 30,
) -> Server:  # fmt: skip
    """A server that is ready to `run`."""
    metrics = Metrics()
    async_engine = AsyncEngine(engine, max_queue, metrics)
    app = create_app(async_engine, metrics, model_name, api_key)
    return Server(app, async_engine, host, port, shutdown_timeout)


@contextlib.contextmanager
def running(engine: Engine, model_name: str = "tiny", **options: Any) -> Iterator[str]:
    """A server on a free port of this machine, in a thread; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        server = make_server(engine, model_name, host, port, **options)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start; its log says why")
            time.sleep(0.01)
        try:
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join()
