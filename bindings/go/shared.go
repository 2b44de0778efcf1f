package pagedllm

import "sync"

// shared is a C object that calls use side by side. Closing waits for the calls under way and frees it, once.
type shared[P comparable] struct {
	name string
	free func(P)

	mu     sync.RWMutex
	object P // zero once it is freed
}

// use makes a call on the object, which lives until the call has returned. It is not reentrant.
func (s *shared[P]) use(call func(P) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var freed P
	if s.object == freed {
		return s.closed()
	}
	return call(s.object)
}

func (s *shared[P]) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var freed P
	if s.object != freed {
		s.free(s.object)
		s.object = freed
	}
}

func (s *shared[P]) closed() error { return &Error{ErrClosed, "the " + s.name + " has been closed"} }
