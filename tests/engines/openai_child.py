"""openai's own client against an orchestrator: `python -m tests.engines.openai_child URL`. Prints what it saw."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

MODEL = "tiny"
HELLO: list[Any] = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say something."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


async def main(url: str) -> dict[str, Any]:
    """Every kind of request."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    seen: dict[str, Any] = {"models": [each.id async for each in client.models.list()]}
    chat = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0, seed=1)
    seen["chat"] = chat.choices[0].message.content
    pieces = []
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        seen["usage"] = chunk.usage.completion_tokens if chunk.usage else seen.get("usage")
    seen["streamed"] = "".join(pieces)
    tools = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, tools=TOOLS, tool_choice="none", temperature=0
    )
    seen["tools"] = tools.choices[0].finish_reason
    logs = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3, logprobs=2, temperature=0)
    seen["logprobs"] = len(logs.choices[0].logprobs.tokens)  # type: ignore[union-attr, arg-type]
    many = await client.completions.create(model=MODEL, prompt="hello", max_tokens=3, n=3, temperature=1.0)
    seen["n"] = sorted(choice.index for choice in many.choices)
    first = logs.choices[0].text
    stopped = await client.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=3, temperature=0, stop=[first[:1]] if first else None
    )
    seen["stop"] = stopped.choices[0].finish_reason
    broken = await client.completions.create(model=MODEL, prompt=[9] * 64, max_tokens=2000, stream=True)
    async for _ in broken:
        break
    await broken.close()
    for name, request in (
        ("no such model", {"model": "nobody", "prompt": "a"}),
        ("too long", {"model": MODEL, "prompt": [5] * 5000, "max_tokens": 5}),
        ("wrong", {"model": MODEL, "prompt": []}),
    ):
        try:
            await client.completions.create(**request)  # type: ignore[call-overload]
            seen[name] = "answered"
        except (BadRequestError, NotFoundError) as error:
            seen[name] = type(error).__name__
        except APIError as error:
            seen[name] = f"{type(error).__name__} {error}"

    async def one(number: int) -> bool:
        prompt = [number % 900 + 10, *range(10, 42)]
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
        again = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
        return answer.choices[0].text == again.choices[0].text

    seen["same"] = all(await asyncio.gather(*(one(number) for number in range(100))))
    await client.close()
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
