"""Which event loop: uvloop where it is installed, asyncio's own elsewhere; both are tested."""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, the fastest there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
