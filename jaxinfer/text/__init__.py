"""Text in and out of the engine: tokens, chat markers, incremental decoding."""
