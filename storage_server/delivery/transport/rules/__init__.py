"""Messages between the server and its ucx process. Pure: no socket."""
