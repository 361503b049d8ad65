"""Session hosts: sessions on machines of their own, which any number of gateways serve."""
