"""A server with the messages of OpenEnv's WebSocket, for test_environment_servers.py: it replies as openenv_server.py.

Arguments: its port, and a file that gets a line for each session. The action ``wait`` is never replied to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve


async def session(socket: ServerConnection) -> None:
    heard: list[str] = []
    async for raw in socket:
        message = json.loads(raw)
        data = message["data"]
        if message["type"] == "reset":
            with Path(sys.argv[2]).open("a") as file:
                file.write(f"{data['seed']}\n")
        if data.get("message") == "wait":
            await asyncio.sleep(1000)
        heard = [f"seed {data['seed']} {data['greeting']}"] if message["type"] == "reset" else [*heard, data["message"]]
        observation = {"text": " ".join(heard)}
        result = {"observation": observation, "reward": len(heard) / 2, "done": len(heard) == 3}
        await socket.send(json.dumps({"type": "observation", "data": result}))


async def main() -> None:
    async with serve(session, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
