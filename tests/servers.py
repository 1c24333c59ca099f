"""An HTTP server in threads of the tests' process, for services that a test plays."""

import contextlib
import http.server
import socket
import threading


class HTTPService:
    """Answers GET and POST with what `respond(request, body)` returns, which a subclass defines: status and content."""

    def __init__(self, port: int = 0):
        service, self.connections = self, []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                service.connections.append(self.request)
                super().setup()

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content = service.respond(self, body)
                with contextlib.suppress(ConnectionError):  # a client that has given up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:  # those that are kept open too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
