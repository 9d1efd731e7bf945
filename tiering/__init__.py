"""Where the log's history lives: object stores, and what is kept in them."""
