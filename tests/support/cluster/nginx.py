"""The configuration of the nginx in front of a cluster: the routes that Kubetorch's own has."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cluster.forwarding import FORWARDING_PORT
from tests.support.cluster.network import CONTROL, INGRESS, INGRESS_PORT, METADATA, NGINX_PORT
from tests.support.cluster.service_accounts import API_PORT, FROM_POD

__all__ = ["configuration"]

_TEXT = """
daemon off;
worker_processes 1;
pid @FOLDER@/nginx.pid;
error_log @FOLDER@/logs/nginx.log warn;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path @FOLDER@/nginx/body;
    proxy_temp_path @FOLDER@/nginx/proxy;
    fastcgi_temp_path @FOLDER@/nginx/fastcgi;
    uwsgi_temp_path @FOLDER@/nginx/uwsgi;
    scgi_temp_path @FOLDER@/nginx/scgi;

    # Five seconds, as Kubetorch has it: for as long, an address that is gone may be tried.
    resolver @DNS@ valid=5s ipv6=off;

    map $http_upgrade $connection_upgrade {
        default upgrade;
        ''      close;
    }

    proxy_http_version 1.1;
    proxy_buffering off;
    proxy_request_buffering off;

    server {
        listen @PORT@;
        client_max_body_size 0;

        location = /health {
            default_type text/plain;
            return 200 '@HEALTH@';
        }

        # The controller, and the API of Kubernetes, which in a cluster has an address of its own.
        location ~ ^/api/v1/namespaces/[^/]+/pods/[^/]+/portforward$ {
            proxy_pass http://127.0.0.1:@FORWARDING@;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_read_timeout 30d;
        }

        location ~ ^/(api|apis|openapi|version|controller)(/|$) {
            proxy_pass http://127.0.0.1:8081;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_read_timeout 30d;
        }

        location ~ ^/rsync/([^/]+)/ {
            proxy_pass http://kubetorch-data-store.$1.svc.cluster.local:8080;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }

        location / {
            return 404;
        }

        @ROUTE@
    }

    # An ingress: the same routes, from a pod of another namespace.
    server {
        listen @INGRESS_PORT@;
        client_max_body_size 0;
        proxy_bind @INGRESS@;
        @ROUTE@
    }

    # The API of Kubernetes, as pods reach it.
    server {
        listen @DNS@:@API_PORT@ ssl;
        ssl_certificate @FOLDER@/api.pem;
        ssl_certificate_key @FOLDER@/api.pem;
        location / {
            proxy_pass http://127.0.0.1:8081;
            proxy_set_header @FROM_POD@ yes;
        }
    }

    # Where a cloud gives the credentials of a node to who asks for them.
    server {
        listen @METADATA@:80;
        location / {
            return 200 'credentials';
        }
    }
}
"""

_ROUTE = """
        # /{namespace}/{service}:{port}/{path}
        location ~ ^/([^/]+)/([^/:]+):(\\d+)(/.*)?$ {
            proxy_pass http://$2.$1.svc.cluster.local:$3$4$is_args$args;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_set_header X-Real-IP $remote_addr;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_connect_timeout 300s;
            proxy_send_timeout 300s;
            proxy_read_timeout 30d;
        }
"""


def configuration(folder: Path, version: str) -> str:
    """For an nginx whose files are in a folder, in front of a Kubetorch of that version."""
    health = {
        "status": "ok",
        "version": version,
        "config": {"log_streaming_enabled": False, "metrics_enabled": False},
    }
    values = {"FOLDER": str(folder), "DNS": CONTROL, "PORT": str(NGINX_PORT), "HEALTH": json.dumps(health)}
    values |= {"FORWARDING": str(FORWARDING_PORT), "INGRESS": INGRESS, "INGRESS_PORT": str(INGRESS_PORT)}
    values |= {"METADATA": METADATA, "API_PORT": str(API_PORT), "FROM_POD": FROM_POD}
    text = _TEXT.replace("@ROUTE@", _ROUTE)
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
