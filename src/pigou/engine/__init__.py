"""EngineCore: schedules what one worker computes next. No torch, no clock, no I/O."""
