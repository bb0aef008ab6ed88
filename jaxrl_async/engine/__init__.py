"""The generation engine: JetStream interface, scheduler, cache, sampling."""
