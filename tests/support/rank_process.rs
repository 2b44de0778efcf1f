//! Ranks that are processes. A rank is the test program, started with the name of a test that only
//! runs in such a process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A process with one rank. It prints its answers, each in a line that begins with "answer: ".
pub struct RankProcess {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl RankProcess {
    /// Starts the test with this name, which does nothing unless the environment variable is set.
    pub fn start(test: &str, variable: &str, value: &str) -> RankProcess {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(variable, value).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (commands, answers) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        RankProcess { process, commands, answers }
    }

    /// Sends a line to the standard input of the process.
    pub fn command(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// Returns the next answer. Lines of the test runner are skipped.
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        while self.answers.read_line(&mut line).unwrap() > 0 {
            if let Some((_, answer)) = line.trim().split_once("answer: ") {
                return answer.into();
            }
            line.clear();
        }
        panic!("the rank has ended without an answer")
    }

    /// Sends a signal. A killed process stays a zombie, as that of a parent that does not wait.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a call without pointers. Nothing has waited for the process, so the id is its own.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }

    /// Waits until the process ends by itself and without an error. Returns its last answer.
    pub fn end(mut self, limit: Duration) -> String {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < limit, "the process has not ended");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
        self.answer()
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
