"""The requirements, one TOML file per chapter; `catalogue` reads them."""
