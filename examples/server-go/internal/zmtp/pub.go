package zmtp

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
)

// queueMessages is the maximum number of messages that wait for one subscriber.
const queueMessages = 4096

// A Pub is a PUB socket. Each subscriber has a queue. If it is full, the messages of this
// subscriber are dropped.
type Pub struct {
	socket
	subscribersMu sync.Mutex
	subscribers   map[*subscriber]struct{}
}

// NewPub starts a socket. Close closes the listener, too.
func NewPub(listener net.Listener, options Options) *Pub {
	p := &Pub{subscribers: make(map[*subscriber]struct{})}
	p.socket = socket{listener: listener, options: options, socketType: "PUB",
		peers: []string{"SUB", "XSUB"}, serve: p.serve}
	p.start()
	return p
}

// Publish sends a message to its subscribers without waiting for them.
func (p *Pub) Publish(topic string, frames ...[]byte) {
	message := AppendMessage(nil, append([][]byte{[]byte(topic)}, frames...)...)
	p.subscribersMu.Lock()
	defer p.subscribersMu.Unlock()
	for s := range p.subscribers {
		if s.subscribed(topic) && !s.offer(message) && !s.lagged {
			s.lagged = true
			p.options.Log.Warn("a subscriber of KV events is too slow, and misses some",
				"client", s.RemoteAddr().String())
		}
	}
}

// A subscriber is a connection with its subscriptions.
type subscriber struct {
	*connection
	queue       chan []byte
	queuedBytes atomic.Int64
	maxBytes    int64
	lagged      bool // guarded by subscribersMu

	mu     sync.Mutex
	topics map[string]int // prefixes, with the number of their subscriptions
}

func (p *Pub) serve(c *connection) error {
	s := &subscriber{connection: c, queue: make(chan []byte, queueMessages),
		maxBytes: p.options.QueueBytes, topics: make(map[string]int)}
	p.subscribersMu.Lock()
	p.subscribers[s] = struct{}{}
	p.subscribersMu.Unlock()
	written := make(chan error, 1)
	go func() { written <- s.writeQueue() }()
	err := s.readSubscriptions()
	p.subscribersMu.Lock()
	delete(p.subscribers, s)
	p.subscribersMu.Unlock()
	s.Close()
	close(s.queue) // only a subscriber in the map is offered messages
	if writeErr := <-written; writeErr != nil {
		return writeErr // the reason why the connection could not be read
	}
	return err
}

// offer adds a message to the queue, unless it is full. A message of any size fits an empty queue.
func (s *subscriber) offer(message []byte) bool {
	size := int64(len(message))
	if total := s.queuedBytes.Add(size); total > s.maxBytes && total != size {
		s.queuedBytes.Add(-size)
		return false
	}
	select {
	case s.queue <- message:
		return true
	default:
		s.queuedBytes.Add(-size)
		return false
	}
}

func (s *subscriber) writeQueue() (err error) {
	for message := range s.queue {
		if err == nil {
			if err = s.write(message); err != nil {
				s.Close() // ends readSubscriptions
			}
		}
		s.queuedBytes.Add(-int64(len(message)))
	}
	return err
}

// readSubscriptions reads until the connection ends. ZMTP 3.0 has subscriptions as messages, and
// 3.1 as commands.
func (s *subscriber) readSubscriptions() error {
	for {
		frames, command, err := s.read()
		if err != nil {
			return err
		}
		if !command {
			if body := frames[0]; len(frames) == 1 && len(body) > 0 && body[0] <= 1 {
				s.subscribe(string(body[1:]), body[0] == 1)
			}
			continue
		}
		switch name, body := cutCommand(frames[0]); name {
		case "SUBSCRIBE", "CANCEL":
			s.subscribe(string(body), name == "SUBSCRIBE")
		case "PING":
			s.offer(pong(body))
		}
	}
}

func (s *subscriber) subscribe(prefix string, add bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case add && (s.topics[prefix] > 0 || len(s.topics) < maxSubscriptions):
		s.topics[prefix]++
	case !add && s.topics[prefix] > 1:
		s.topics[prefix]--
	case !add:
		delete(s.topics, prefix)
	}
}

// maxSubscriptions bounds the time that Publish needs for one subscriber. Further subscriptions are
// ignored.
const maxSubscriptions = 256

func (s *subscriber) subscribed(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for prefix := range s.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}
