package zmtp

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
)

func options() Options {
	return Options{WriteTimeout: 10 * time.Second, QueueBytes: 1 << 20,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

// client opens a connection, as a client with a type of socket.
func client(t *testing.T, address net.Addr, socketType, peer string) *connection {
	t.Helper()
	raw, err := net.Dial("tcp", address.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { raw.Close() })
	c, err := open(raw, socketType, []string{peer}, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	return c
}

func send(t *testing.T, c *connection, data []byte) {
	t.Helper()
	if err := c.write(data); err != nil {
		t.Fatal(err)
	}
}

// await waits until a publisher has handled the subscriptions of a client: commands are handled in
// their order, and a PING is answered.
func await(t *testing.T, c *connection) {
	t.Helper()
	send(t, c, appendCommand(nil, "PING", []byte("\x00\x00context")))
	frames, command, err := c.read()
	if want := "\x04PONGcontext"; err != nil || !command || string(frames[0]) != want {
		t.Fatalf("%q, command %v, %v", frames, command, err)
	}
}

func subscribe(t *testing.T, p *Pub, prefixes ...string) *connection {
	t.Helper()
	c := client(t, p.listener.Addr(), "SUB", "PUB")
	for _, prefix := range prefixes {
		send(t, c, AppendMessage(nil, append([]byte{1}, prefix...)))
	}
	await(t, c)
	return c
}

func expect(t *testing.T, c *connection, want ...string) {
	t.Helper()
	for _, message := range want {
		frames, _, err := c.read()
		if text := string(bytes.Join(frames, []byte{'|'})); err != nil || text != message {
			t.Fatalf("%.100q instead of %.100q, %v", text, message, err)
		}
	}
}

func TestSubscribersReceiveTheMessagesOfTheirPrefixes(t *testing.T) {
	p := NewPub(listen(t), options())
	defer p.Close()
	all, one, twice := subscribe(t, p, ""), subscribe(t, p, "ab"), subscribe(t, p, "a", "a", "b")
	none, commands := subscribe(t, p), subscribe(t, p, "x")
	send(t, commands, appendCommand(nil, "SUBSCRIBE", []byte("abc")))
	send(t, commands, appendCommand(nil, "CANCEL", []byte("x")))
	send(t, twice, AppendMessage(nil, []byte("\x00a"))) // one subscription is left
	await(t, commands)
	await(t, twice)
	long := strings.Repeat("long", 100)
	for _, topic := range []string{"a", "abc", "x", "b"} {
		p.Publish(topic, []byte(long), nil)
	}
	send(t, one, AppendMessage(nil, []byte("\x00ab")))
	send(t, twice, AppendMessage(nil, []byte("\x00a")))
	await2 := func(c *connection, want ...string) {
		t.Helper()
		for i := range want {
			want[i] += "|" + long + "|"
		}
		expect(t, c, want...)
		await(t, c)
	}
	await2(all, "a", "abc", "x", "b")
	await2(one, "abc")
	await2(twice, "a", "abc", "b")
	await2(none)
	await2(commands, "abc")
	p.Publish("ab")
	p.Publish("b")
	expect(t, all, "ab", "b")
	expect(t, twice, "b")
	await(t, one)
}

func TestASlowSubscriberDelaysNothingAndIsClosed(t *testing.T) {
	log := new(bytes.Buffer)
	slowOptions := options()
	slowOptions.WriteTimeout = 3 * time.Second
	slowOptions.Log = slog.New(slog.NewTextHandler(log, nil))
	p := NewPub(listen(t), slowOptions)
	slow, fast := subscribe(t, p, ""), subscribe(t, p, "")
	payload := make([]byte, 256<<10)
	const messages = 200 // 50 MB, more than the buffers of a connection
	for i := range messages {
		begin := time.Now()
		p.Publish("a", []byte(fmt.Sprint(i)), payload)
		if passed := time.Since(begin); passed > 2*time.Second {
			t.Fatalf("Publish needed %v", passed)
		}
		for range 3 { // frames larger than those of clients
			if _, err := readLarge(fast); err != nil {
				t.Fatal(err)
			}
		}
	}
	count := func() int {
		p.subscribersMu.Lock()
		defer p.subscribersMu.Unlock()
		return len(p.subscribers)
	}
	for begin := time.Now(); count() > 1; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > 20*time.Second {
			t.Fatal("the slow subscriber is still connected")
		}
	}
	received := 0
	for {
		frame, err := readLarge(slow)
		if err != nil {
			break
		}
		received += len(frame)
	}
	if received >= messages*len(payload) {
		t.Error("the slow subscriber has not lost any message")
	}
	p.Close()
	text := log.String()
	if strings.Count(text, "too slow") != 1 || !strings.Contains(text, "timeout") {
		t.Error(text)
	}
}

// readLarge reads a frame of any size.
func readLarge(c *connection) ([]byte, error) {
	header := make([]byte, 2)
	if _, err := io.ReadFull(c.in, header); err != nil {
		return nil, err
	}
	size := uint64(header[1])
	if header[0]&flagLong != 0 {
		for range 7 {
			next, err := c.in.ReadByte()
			if err != nil {
				return nil, err
			}
			size = size<<8 | uint64(next)
		}
	}
	frame := make([]byte, size)
	_, err := io.ReadFull(c.in, frame)
	return frame, err
}

func TestRequestsAreAnsweredInTheirOrder(t *testing.T) {
	r := NewRouter(listen(t), options(), func(request [][]byte) ([][][]byte, error) {
		if string(request[1]) == "bad" {
			return nil, fmt.Errorf("bad request")
		}
		return [][][]byte{{nil, request[1], []byte("1")}, {nil, []byte("end")}}, nil
	})
	defer r.Close()
	one := client(t, r.listener.Addr(), "REQ", "ROUTER")
	other := client(t, r.listener.Addr(), "DEALER", "ROUTER")
	send(t, one, AppendMessage(nil, nil, []byte("a")))
	send(t, other, AppendMessage(AppendMessage(nil, nil, []byte("b")), nil, []byte("c")))
	await := func(c *connection, name string) { expect(t, c, "|"+name+"|1", "|end") }
	await(one, "a")
	await(other, "b")
	await(other, "c")
	send(t, other, AppendMessage(nil, nil, []byte("bad")))
	if _, _, err := other.read(); err != io.EOF {
		t.Error(err)
	}
	send(t, one, AppendMessage(nil, nil, []byte("d")))
	await(one, "d")
}

func TestBadClientsAreDisconnected(t *testing.T) {
	p := NewPub(listen(t), options())
	defer p.Close()
	greeting := append([]byte{255, 0, 0, 0, 0, 0, 0, 0, 0, 127, 3, 0}, make([]byte, 52)...)
	copy(greeting[12:], "NULL")
	with := func(place int, value byte) string {
		changed := bytes.Clone(greeting)
		changed[place] = value
		return string(changed)
	}
	good := string(greeting)
	ready := string(appendCommand(nil, "READY", appendProperty(nil, "socket-TYPE", "SUB")))
	for name, data := range map[string]string{
		"signature":           with(0, 1),
		"end of signature":    with(9, 0),
		"version 2":           with(10, 2),
		"mechanism":           with(12, 'X'),
		"HTTP":                strings.Repeat("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 2),
		"no READY":            good + string(appendCommand(nil, "ERROR", nil)),
		"READY as message":    good + "\x00" + ready[1:],
		"cut name":            good + "\x04\x02\x05R",
		"empty command":       good + "\x04\x00",
		"cut property":        good + string(appendCommand(nil, "READY", []byte("\xff"))),
		"cut value":           good + "\x04\x0c\x05READY\x01a\xff\xff\xff\xff",
		"no type":             good + string(appendCommand(nil, "READY", nil)),
		"PUB":                 good + strings.Replace(ready, "SUB", "PUB", 1),
		"large frame":         good + ready + "\x02\x00\x00\x00\x00\x00\x00\x10\x01",
		"huge frame":          good + ready + "\x02\xff\xff\xff\xff\xff\xff\xff\xff",
		"many frames":         good + ready + strings.Repeat("\x01\x00", maxFrames),
		"command in message":  good + ready + "\x01\x00\x04\x00",
		"command with a more": good + ready + "\x05\x00",
	} {
		raw, err := net.Dial("tcp", p.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(raw, data)
		raw.SetReadDeadline(time.Now().Add(5 * time.Second)) // less than the timeout of the handshake
		if _, err := io.Copy(io.Discard, raw); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
		raw.Close()
	}
	c := subscribe(t, p, "") // other clients do not notice
	send(t, c, AppendMessage(nil, []byte("\x02?")))
	send(t, c, AppendMessage(nil, []byte("\x01"), []byte("two frames")))
	send(t, c, appendCommand(nil, "UNKNOWN", nil))
	await(t, c)
	p.Publish("a")
	expect(t, c, "a")
}

func TestCloseLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	p := NewPub(listen(t), options())
	r := NewRouter(listen(t), options(), nil)
	subscribe(t, p, "")
	client(t, r.listener.Addr(), "DEALER", "ROUTER")
	for _, listener := range []net.Listener{p.listener, r.listener} {
		silent, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
	}
	p.Close()
	r.Close()
	// A goroutine is counted for some instructions after Close has seen its last statement.
	after := runtime.NumGoroutine()
	for deadline := time.Now().Add(20 * time.Second); after > before && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
		after = runtime.NumGoroutine()
	}
	if after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
	p.Publish("a") // is allowed, and has no effect
}
