"""The generation engine: JetStream interface, scheduler, cache and sampling."""
