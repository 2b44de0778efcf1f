package pagedllm_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// The tests start this program as a worker with these variables.
const groupVariable, blockSizeVariable = "PAGEDLLM_TEST_GROUP", "PAGEDLLM_TEST_BLOCK_SIZE"

func TestMain(m *testing.M) {
	if group := os.Getenv(groupVariable); group != "" {
		if err := work(group); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// work runs the worker with rank 1.
func work(group string) error {
	blockSize, err := strconv.Atoi(os.Getenv(blockSizeVariable))
	if err != nil {
		return err
	}
	world, err := pagedllm.SharedMemoryCommunicator(group, 1, 2, lastResort)
	if err != nil {
		return err
	}
	defer world.Close()
	options, isRead := ofTwo(world), false
	options.BlockSize = blockSize
	options.Progress = func(done, total int64) { isRead = done == total }
	if err := pagedllm.RunWorker(background, options); err != nil {
		return err
	}
	if !isRead {
		return errors.New("no progress was reported")
	}
	return nil
}

// process starts the worker with rank 1 as a process. Its messages are in the result.
func process(t *testing.T, group string, blockSize int) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	command, messages := exec.Command(os.Args[0]), new(strings.Builder)
	command.Env = append(os.Environ(), groupVariable+"="+group, blockSizeVariable+"="+strconv.Itoa(blockSize))
	command.Stderr = messages
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { command.Process.Kill() })
	return command, messages
}

func groupFile() string {
	directory := "/dev/shm"
	if _, err := os.Stat(directory); err != nil {
		directory = os.TempDir()
	}
	return fmt.Sprintf("%s/pagedllm-go-%d", directory, os.Getpid())
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func join(t *testing.T, rank, size int) *pagedllm.Communicator {
	t.Helper()
	world, err := pagedllm.SharedMemoryCommunicator(groupFile(), rank, size, lastResort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { world.Close() })
	return world
}

func ofTwo(world *pagedllm.Communicator) pagedllm.Options {
	options := small()
	options.TensorParallel, options.Communicator, options.WorkerTimeout = 2, world, lastResort
	return options
}

// wantAnswers requires that the engine has the tokens of one worker.
func wantAnswers(t *testing.T, engine *pagedllm.Engine) {
	t.Helper()
	alone := open(t)
	for _, question := range []string{france, "What is 7 + 5?", "What does a cow say?"} {
		want, got := generate(t, alone, chat(t, alone, question)), generate(t, engine, chat(t, engine, question))
		if len(got.Tokens) == 0 || !slices.Equal(got.Tokens, want.Tokens) {
			t.Errorf("%q has the tokens %v, not %v", question, got.Tokens, want.Tokens)
		}
	}
}

func TestTwoProcessesHaveTheTokensOfOne(t *testing.T) {
	worker, messages := process(t, groupFile(), 16)
	world := join(t, 0, 2)
	if world.Rank() != 0 || world.Size() != 2 {
		t.Errorf("rank %d of %d", world.Rank(), world.Size())
	}
	engine, err := pagedllm.Open(background, ofTwo(world))
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	world.Close() // it belongs to the engine
	if !exists(groupFile()) {
		t.Error("Close has closed the communicator of the engine")
	}
	wantAnswers(t, engine)
	engine.Close()
	if exists(groupFile()) {
		t.Error("the group still exists")
	}
	if err := worker.Wait(); err != nil {
		t.Error(err, messages)
	}
}

func TestTwoDevicesOfOneProcessHaveTheTokensOfOne(t *testing.T) {
	options := small()
	options.Device = "cpu,cpu"
	engine, err := pagedllm.Open(background, options)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	wantAnswers(t, engine)
	options.TensorParallel = 3
	_, err = pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "tensor_parallel")
}

func TestAPlanIsThatOfOneWorker(t *testing.T) {
	whole, err := small().Plan()
	if err != nil {
		t.Fatal(err)
	}
	half, err := ofTwo(nil).Plan()
	if err != nil || 2*half.BlockBytes != whole.BlockBytes {
		t.Errorf("a block has %d bytes, and %d with one worker (%v)", half.BlockBytes, whole.BlockBytes, err)
	}
}

func TestWorkersWithOtherOptionsFailOnBothRanks(t *testing.T) {
	worker, messages := process(t, groupFile(), 32)
	_, err := pagedllm.Open(background, ofTwo(join(t, 0, 2)))
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "block_size")
	if worker.Wait() == nil || !strings.Contains(messages.String(), "rank 1 has block_size 32") {
		t.Errorf("the worker has not failed: %s", messages)
	}
}

func TestAWorkerNeedsACommunicatorOfAnotherRank(t *testing.T) {
	wantMessage(t, pagedllm.RunWorker(background, ofTwo(nil)), pagedllm.ErrInvalidArgument, "communicator")
	options := small()
	options.Communicator = join(t, 0, 1)
	wantMessage(t, pagedllm.RunWorker(background, options), pagedllm.ErrInvalidArgument, "rank 0")
	// The call has failed, so the communicator still belongs to this process.
	engine, err := pagedllm.Open(background, options)
	if err != nil {
		t.Fatal(err)
	}
	engine.Close()
}

// runInBackground runs the worker with rank 1 on a goroutine. The result has its error.
func runInBackground(ctx context.Context, t *testing.T) <-chan error {
	ended := make(chan error, 1)
	go func() {
		world, err := pagedllm.SharedMemoryCommunicator(groupFile(), 1, 2, lastResort)
		if err == nil {
			t.Cleanup(func() { world.Close() })
			err = pagedllm.RunWorker(ctx, ofTwo(world))
		}
		ended <- err
	}()
	return ended
}

func TestAContextEndsRunWorkerButNotALoadedWorker(t *testing.T) {
	ctx, cancel := cancellable(t)
	ended := runInBackground(ctx, t)
	engine, err := pagedllm.Open(background, ofTwo(join(t, 0, 2)))
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	cancel()
	wantErr(t, <-ended, context.Canceled)
	wantAnswers(t, engine)
}

// doneLater is a context that is done after the first call of Err.
type doneLater struct {
	context.Context
	cancel context.CancelFunc
}

func (c doneLater) Err() error {
	defer c.cancel()
	return c.Context.Err()
}

func TestAWorkerWhoseLoadingIsCancelledIsAnErrorOfTheEngine(t *testing.T) {
	ctx, cancel := cancellable(t)
	ended := runInBackground(doneLater{ctx, cancel}, t)
	world := join(t, 0, 2)
	wantErr(t, <-ended, context.Canceled)
	engine, err := pagedllm.Open(background, ofTwo(world))
	wantMessage(t, err, pagedllm.ErrCancelled, "rank 1")
	if engine != nil {
		t.Error("there is an engine")
	}
}

func TestACommunicatorThatAnEngineHasTakenIsRefused(t *testing.T) {
	const taken = "the communicator is closed, or belongs to an engine or a worker; create another one"
	options := small()
	options.Communicator = join(t, 0, 1)
	engine, err := pagedllm.Open(background, options)
	if err != nil {
		t.Fatal(err)
	}
	_, err = pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, taken)
	engine.Close()
	_, err = pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, taken)
	wantMessage(t, pagedllm.RunWorker(background, options), pagedllm.ErrInvalidArgument, taken)
	options.Communicator.Close()
	wantErr(t, pagedllm.RunWorker(background, options), pagedllm.ErrClosed)
}

func TestACommunicatorThatIsNotUsedIsClosed(t *testing.T) {
	wantNoLeak(t, func() {
		for range 20 {
			world := join(t, 0, 1)
			if !exists(groupFile()) {
				t.Error("there is no group")
			}
			world.Close()
			world.Close()
			if exists(groupFile()) {
				t.Error("the group still exists")
			}
		}
		if _, err := pagedllm.SharedMemoryCommunicator(groupFile(), 0, 1, 0); err != nil {
			t.Error(err)
		}
		eventually(t, "the unreachable communicator is closed", func() bool {
			runtime.GC()
			return !exists(groupFile())
		})
	})
}

func TestSharedMemoryCommunicatorReturnsTheErrorsOfTheLibrary(t *testing.T) {
	for _, refused := range []struct {
		path       string
		rank, size int
		code       pagedllm.Code
		words      string
	}{
		{groupFile(), 2, 2, pagedllm.ErrInvalidArgument, "rank"},
		{groupFile(), -1, 2, pagedllm.ErrInvalidArgument, "rank is -1"},
		{groupFile(), 0, 2, pagedllm.ErrIO, "rank 1 has not joined"},
		{"/nowhere/group", 0, 1, pagedllm.ErrIO, "/nowhere/group"},
		{groupFile() + "\x00x", 0, 1, pagedllm.ErrInvalidArgument, "NUL"},
	} {
		_, err := pagedllm.SharedMemoryCommunicator(refused.path, refused.rank, refused.size, time.Millisecond)
		wantMessage(t, err, refused.code, refused.words)
	}
	if exists(groupFile()) {
		t.Error("a group still exists")
	}
}
